"""Benchmarks: what is claimed of speed, measured on this machine and written down with every sample."""

BENCHMARKS = {
    "launch_overhead": "what a torchx job costs over bare torch.distributed.run, and when ranks are ready",
    "head": "what log-probabilities and their gradients cost, ours and others', against three matrix products",
    "head_parallel": "what the head costs with its vocabulary cut over GPUs, against one that has it all",
    "layouts": "what layouts and attention algorithms cost on several GPUs, and whether they all train the same model",
    "reproducible": "what the same bits in every layout cost, whether every layout has them, and how far off they are",
    "bridge": "what a bridge between two layouts costs, bytes and time of each direction, for every way across",
    "encoder_bridge": "whether two modules in two layouts train as one process does, and which check sees which bug",
    "metrics_cost": "what share of a step the metrics take, on a GPU with the Qwen3-0.6B architecture",
}
"""Name -> the question it answers. Each is a module of this package, with `measure() -> record` and `in_words(record)`,
and a record's ``bars`` say what must hold. One with a page has `write_page(record, folder)`, and one with a
folder of its own under experiments/ a `FOLDER`."""
