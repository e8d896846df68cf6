"""Jobs of several nodes: how ranks are spread, which node this is, and where its agents meet.

Every node of a job runs one agent (`workbench.launch.agent`), which starts an equal share of the ranks. The agents meet
at a store on the first node (torch's c10d rendezvous), whose address each of them finds in its environment:

    WB_NODE         number of this node, from 0; without it SLURM_NODEID
    WB_HEAD         address of the first node; without it SLURM_LAUNCH_NODE_IPADDR, where srun was started
    WB_HEAD_IN      name of another variable that holds that address; empty or missing on the first node itself
    WB_LOCAL_ADDR   address of this node for the others; without it its full host name

The port follows from the name of the job, so that nothing has to be exchanged before.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.errors import LaunchError

NODE, HEAD, HEAD_IN, LOCAL_ADDRESS = "WB_NODE", "WB_HEAD", "WB_HEAD_IN", "WB_LOCAL_ADDR"

_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to outgoing connections (32768 and up), above those of common services."""


def spread(name: str, ranks: int, nodes: int) -> int:
    """Return the number of nodes of a run: those requested, at most one for each rank.

    Raises:
        LaunchError: its ranks cannot be spread evenly, or no node is requested.

    Example:
        >>> spread("tp2", 16, 2), spread("one_rank", 1, 2)
        (2, 1)
    """
    if nodes < 1:
        raise LaunchError(f"{nodes} nodes for each job", rule="at least one", fix="leave nodes out for one")
    taken = min(nodes, ranks)
    if ranks % taken:
        raise LaunchError(
            f"run {name} on {nodes} nodes",
            found=f"{ranks} ranks",
            rule="every node runs the same number of ranks",
            fix=f"choose a number of nodes that divides {ranks}, or leave this run out with --only",
        )
    return taken


def this_node(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this node in its job, from 0."""
    return int(environment.get(NODE) or environment.get("SLURM_NODEID") or "0")


def nodes_of(arguments: Sequence[str]) -> int:
    """Return the number of nodes in the arguments of an agent."""
    return _options(arguments).nnodes


def meeting(
    arguments: Sequence[str], run_dirs: Sequence[Path], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the arguments of torch.distributed.run by which the agents of a job meet; [] on a single node.

    Raises:
        LaunchError: nothing names the first node.
    """
    if nodes_of(arguments) == 1:
        return []
    head = _head(environment)
    job = environment.get("SLURM_JOB_ID") or (str(run_dirs[0]) if run_dirs else "")
    attempt = environment.get("SLURM_RESTART_COUNT", "0")
    number = zlib.crc32(f"{job} {attempt}".encode())
    address = environment.get(LOCAL_ADDRESS, "")
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{_PORTS[number % len(_PORTS)]}",
        f"--rdzv-id={number:08x}",
        f"--rdzv-conf=is_host={int(this_node(environment) == 0)}",
        *([f"--local-addr={address}"] if address else []),
    ]


def own_gpus(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES of this node's ranks if the agents of one machine share its GPUs; {} otherwise."""
    options = _options(arguments)
    gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if options.nnodes == 1 or len(gpus) != options.nnodes * options.nproc_per_node:
        return {}
    first = this_node(environment) * options.nproc_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + options.nproc_per_node])}


def _head(environment: Mapping[str, str]) -> str:
    if head := environment.get(HEAD):
        return head
    if variable := environment.get(HEAD_IN):
        # a list on Kubernetes: the hosts of the first node's task
        return environment.get(variable, "").split(",")[0] or "localhost"
    if head := environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return head
    raise LaunchError(
        "let the agents of several nodes meet",
        found=f"neither {HEAD} nor {HEAD_IN} nor SLURM_LAUNCH_NODE_IPADDR in the environment",
        rule="every agent knows the address of the first node",
        fix=f"start the job with --where slurm or kubernetes, or set {HEAD} and {NODE} for each agent",
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    own = arguments[: arguments.index("-m")] if "-m" in arguments else arguments
    return parser.parse_known_args(list(own))[0]
