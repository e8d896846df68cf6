"""One bit that is wrong: the last one of one number that a module makes, or of its gradient, for one token."""

from __future__ import annotations

import torch

from workbench.train import checkpoint


def bumped(value, place):
    """The activation with one number of the token at that place moved to its neighbour among floats."""
    chosen = torch.zeros_like(value, dtype=torch.bool)
    chosen[0, place].view(-1)[3] = True
    with torch.no_grad():
        other = torch.nextafter(value, value + 1)
    return torch.where(chosen, other, value)


def plant(monkeypatch, module, *, place, loads, backward=False):
    """Make the outputs of a module wrong by one unit in the last place from now on.

    Args:
        monkeypatch: of pytest.
        module: name of the module.
        place: which token of this rank's row, by its place there.
        loads: numbers of the policies that are loaded from now on in which it is so, from 0.
        backward: it is the gradient that is off.
    """
    load, made = checkpoint.load_policy, []

    def planted(*given, **named):
        policy = load(*given, **named)
        if len(made) in loads:

            def hook(_, __, out):
                if not backward:
                    return bumped(out, place)
                out.register_hook(lambda gradient: bumped(gradient, place))
                return None

            policy.model.get_submodule(module).register_forward_hook(hook)
        made.append(policy)
        return policy

    monkeypatch.setattr(checkpoint, "load_policy", planted)
