"""Options of `GRPOConfig` (TRL 1.16.0, transformers 5.23.0) that leave the loss of given log-probabilities as it is."""

from __future__ import annotations

from collections.abc import Mapping

_BY_REASON: Mapping[str, str] = {
    "they make the advantages, which a loss takes as they are": """
        num_generations reward_weights multi_objective_aggregation scale_rewards
    """,
    "they choose the weights that log-probabilities come from": """
        model_init_kwargs trust_remote_code disable_dropout sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps
    """,
    "they act with use_adaptive_entropy alone, which is refused": """
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    """,
    "they choose and pad the rows": """
        shuffle_dataset pad_to_multiple_of num_generations_eval generation_batch_size chat_template_kwargs
    """,
    "they decide which tokens are sampled, and where": """
        ds3_gather_for_generation top_p top_k min_p generation_kwargs repetition_penalty cache_implementation
        vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size max_tool_calling_iterations
        use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    """,
    "they decide what is logged": """
        log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    """,
    "they are transformers' TrainingArguments: optimizer, precision, data loading, logging and checkpoints": """
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
        lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        optim_target_modules average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16
        bf16_full_eval fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs
        gradient_checkpointing gradient_checkpointing_kwargs torch_compile torch_compile_backend
        torch_compile_mode liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps
        auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node
        logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm
        report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
        eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
        enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
        hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
        restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
        parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict
        resume_from_checkpoint local_rank
    """,
}

WITHOUT_EFFECT: Mapping[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Option -> the reason why it does not change the loss."""
