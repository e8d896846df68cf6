"""`workbench completion`: scripts that complete verbs, options, settings, and names of experiments and runs.

Everything but names is in the script, so that a tab starts no Python.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shlex
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import tyro

import workbench.cli
from workbench.cli.terminal import print_lines
from workbench.launch.schema import settings_by_name

Shell = Literal["bash", "zsh", "fish"]

_BASH = """\
# Completion of `workbench`: workbench completion bash > ~/.local/share/bash-completion/completions/workbench
_workbench_names() {
  local folder
  for folder in experiments/*/ ./*/; do
    [ -d "$folder/runs" ] || [ -f "$folder/comparison.json" ] || [ -f "$folder/ablation.yaml" ] || continue
    basename "$folder"
    ls "$folder/runs" 2>/dev/null | grep -v -e '\\.json$' -e '^launchers$'
  done
}
_workbench() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options="" values=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "@VERBS@" -- "$current"))
    return
  fi
  case "${COMP_WORDS[1]}" in
@OPTIONS@
  esac
  case "${COMP_WORDS[1]} $before" in
@VALUES@
  esac
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [ "${current#-}" != "$current" ]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    COMPREPLY=($(compgen -W "$(_workbench_names)" -- "$current") $(compgen -f -- "$current"))
  fi
}
complete -o filenames -o bashdefault -F _workbench workbench
"""
_ZSH = """\
# Completion of `workbench`, in ~/.zshrc: eval "$(workbench completion zsh)"
autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit -u
bashcompinit
"""
_FISH = """\
# Completion of `workbench`: workbench completion fish > ~/.config/fish/completions/workbench.fish
function __workbench_names
    for folder in experiments/*/ ./*/
        test -d $folder/runs -o -f $folder/comparison.json -o -f $folder/ablation.yaml; or continue
        basename $folder
        ls $folder/runs 2>/dev/null | string match -v '*.json' | string match -v launchers
    end
end
"""


def completion(shell: Annotated[Shell, tyro.conf.Positional]) -> int:
    """Print the completion script of a shell.

    bash: workbench completion bash > ~/.local/share/bash-completion/completions/workbench

    zsh: eval "$(workbench completion zsh)" in ~/.zshrc

    fish: workbench completion fish > ~/.config/fish/completions/workbench.fish
    """
    print_lines([_fish() if shell == "fish" else (_ZSH if shell == "zsh" else "") + _bash()])
    return 0


def options() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return verb -> option -> its choices, () for any value."""
    return {verb: _options(verb, module) for verb, (module, _) in workbench.cli.VERBS.items()}


def _options(verb: str, module_name: str) -> dict[str, tuple[str, ...]]:
    common: dict[str, tuple[str, ...]] = {"--help": ()}
    if verb not in workbench.cli.NO_JSON:
        common["--json"] = ()
    module = importlib.import_module(f"workbench.cli.{module_name}")
    function = getattr(module, verb)
    if "arguments" not in inspect.signature(function).parameters:
        hints = get_type_hints(function, include_extras=True)
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return {_flag(name, hints[name]): _choices(hints[name]) for name in keywords} | common
    classes = {"run": "_Options", "bench": "BenchOptions", "verify": "VerifyOptions"}
    if verb not in classes:
        return common
    hints = get_type_hints(getattr(module, classes[verb]), include_extras=True)
    fields = [field.name for field in dataclasses.fields(getattr(module, classes[verb]))]
    named = {
        _flag(name, hints[name]): _choices(hints[name])
        for name in fields
        if tyro.conf.Positional not in _parts(hints[name])
    }
    leaves = {
        f"--{name.replace('_', '-')}": each.choices for name, each in settings_by_name().items() if not each.settings
    }
    return named | (leaves | {"--help-all": ()} if verb == "run" else {}) | common


def _parts(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) is Annotated else ()


def _flag(name: str, hint: object) -> str:
    given = (getattr(part, "name", None) for part in _parts(hint))  # `tyro.conf.arg(name=...)`
    return f"--{next(filter(None, given), name).replace('_', '-')}"


def _choices(hint: object) -> tuple[str, ...]:
    kinds = [each for part in (hint, *get_args(hint)) for each in (part, *get_args(part))]
    return tuple(dict.fromkeys(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)))


def _bash() -> str:
    by_verb = options()
    text = _BASH.replace("@VERBS@", " ".join(by_verb))
    text = text.replace(
        "@OPTIONS@", "\n".join(f'    {verb}) options="{" ".join(each)}" ;;' for verb, each in by_verb.items())
    )
    values = [
        f'    "{verb} {option}") values="{" ".join(choices)}" ;;'
        for verb, each in by_verb.items()
        for option, choices in each.items()
        if choices
    ]
    return text.replace("@VALUES@", "\n".join(values))


def _fish() -> str:
    lines = ["complete -c workbench -f -n __fish_use_subcommand -a " + shlex.quote(" ".join(workbench.cli.VERBS))]
    lines += ["complete -c workbench -n 'not __fish_use_subcommand' -a '(__workbench_names)'"]
    for verb, each in options().items():
        for option, choices in each.items():
            takes = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"complete -c workbench -n '__fish_seen_subcommand_from {verb}' -l {option[2:]}{takes}")
    return "\n".join([_FISH, *lines])
