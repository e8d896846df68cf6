"""Serve a tiny Qwen3 by llama.cpp: FOLDER has config.json and model.safetensors of `transformers`; ends with its input.

Writes FOLDER/model.gguf, whose vocabulary has one character for each id, and prints the address.
"""

import json
import sys
from pathlib import Path

import gguf
import xllamacpp
from safetensors.numpy import load_file

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def gguf_name(name):
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, *module = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{LAYER['.'.join(module)]}.weight"


def convert(folder):
    config = json.loads((folder / "config.json").read_text())
    size, path = config["vocab_size"], folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([chr(ord("a") + id) for id in range(size - 1)] + ["<unk>"])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([1] * (size - 1) + [2])
    writer.add_unk_token_id(size - 1)
    writer.add_add_bos_token(False)
    for name, weight in load_file(folder / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), weight.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main(folder):
    settings = xllamacpp.CommonParams()
    settings.model.path = str(convert(folder))
    settings.n_ctx, settings.n_parallel, settings.port = 256, 1, 0
    settings.n_gpu_layers, settings.warmup, settings.cpuparams.n_threads = 0, False, 1
    # Keys and values in float32, where llama.cpp's default is float16, and plain attention.
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    sys.stdout.write(f"serving at {server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
