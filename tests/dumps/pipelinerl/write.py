"""Write the streams in this folder with PipelineRL's own code: encoding, advantages, collation, `FileStreamWriter`.

    git clone https://github.com/ServiceNow/PipelineRL; git -C PipelineRL checkout 58d39345
    pip install torch==2.13.0 "transformers<5.12" datasets pandas redis omegaconf orjson accelerate
    PYTHONPATH=PipelineRL python tests/dumps/pipelinerl/write.py tests/dumps/pipelinerl

What preprocess.py writes to the trainers (topic training_data): one line a micro-batch, one partition a trainer; packed
with a sentinel of padding, and padded. Two groups of three completions.
"""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from pipelinerl.finetune.data import collate, collate_packed, preprocess_fn
from pipelinerl.finetune.rl import RLConfig, populate_rl_data
from pipelinerl.streams import SingleStreamSpec, StreamRangeSpec, set_streams_backend, write_to_streams

PROMPTS = ([7, 8, 9], [4, 5])
RESPONSES = (6, 3, 5, 4, 7, 2)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)
TOKENIZER = SimpleNamespace(eos_token_id=1, padding_side="right")


def entries() -> list[dict]:
    """Return the samples as the preprocessor has them before it packs."""
    generator = torch.Generator().manual_seed(3)
    dataset = []
    for i, length in enumerate(RESPONSES):
        prompt, response = PROMPTS[i // 3], [*range(20, 19 + length), 1]
        old = (-1.0 - torch.rand(length, generator=generator)).tolist()
        ref = (-1.0 - torch.rand(length, generator=generator)).tolist()
        entry = {
            "input_ids": [*prompt, *response],
            "labels": [-100] * len(prompt) + response,
            "reward": REWARDS[i],
            "logprobs": old,
            "ref_logprobs": ref,
        }
        encoded = preprocess_fn(entry, TOKENIZER, seq_length=64, is_rl=True)
        places = {"group_id": f"group-{i // 3}", "rollout_index": i % 3, "step_index": 0, "model_version": 2}
        dataset.append({**encoded, **places})
    return populate_rl_data(dataset, TOKENIZER.eos_token_id, RLConfig())


def main(folder: Path) -> None:
    """Write one step for two trainers, packed, and one for one trainer, padded."""
    set_streams_backend("files")
    os.chdir(folder)
    for name in ("packed", "padded"):
        shutil.rmtree(name, ignore_errors=True)
    samples = entries()
    spec = StreamRangeSpec(exp_path=Path("packed"), topic="training_data", partition_range=(0, 2))
    with write_to_streams(spec) as writer:
        for partition, own in ((0, samples[:2]), (1, samples[2:4]), (0, samples[4:5]), (1, samples[5:])):
            writer.write(collate_packed(own, TOKENIZER, seq_parallel=4), partition)
    with write_to_streams(SingleStreamSpec(exp_path=Path("padded"), topic="training_data")) as writer:
        for own in (samples[:3], samples[3:]):
            writer.write(collate(own, TOKENIZER))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
