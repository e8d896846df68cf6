"""Recomputation of a record's log-probabilities under any configuration, from the trainer's checkpoints.

Documents are rows of their own, padded at the end: a causal decoder never sees that padding, so no mask is passed and
each kernel runs as it does for whole rows. Models, hidden states and logits are kept while they are small.

Letters: N documents | T tokens of all completions, one after another | C tokens of one | D model dimension
         V vocabulary | R rows: the C tokens of each completion, and one more on both sides.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.mismatch.adapters import Adapter, add_updates, apply_adapter, read_adapter, update_of
from workbench.mismatch.configuration import CURRENT, RECORDED, Configuration
from workbench.mismatch.documents import Document
from workbench.mismatch.gemms import use_gemms
from workbench.mismatch.prefixes import read_prefix
from workbench.mismatch.quantities import recorded_quantity
from workbench.mismatch.routing import install_router, replay
from workbench.mismatch.settings import Trainer
from workbench.policy.decoder import head_of, load_decoder
from workbench.policy.model import DTYPES
from workbench.policy.precision import cast, lift_to_float64
from workbench.policy.routers import has_known_gates

TOKENS = 8192
"""Tokens of a forward pass."""
LOGITS = 2**25
"""Logits that exist at a time."""
KEPT_MODELS, KEPT_PARTS, KEPT_STATES, KEPT_BYTES = 4, 2, 48, 2**28
"""Models, openings, and hidden states and their bytes that are kept, the last ones used: openings of two readings of
the tokens, as a search compares two at a time; of small models as many as have these bytes, for it goes through a dozen
again and again."""


class Computation:
    """The record's documents, and every configuration of the trainer's weights that is asked of them.

    Attributes:
        documents: of the record; of a part, those that were chosen.
        vocabulary: text of each id; None if it is not known.
        document_T, counted_T: [T] number of each token's document, and whether it is compared.
        readings: name -> token ids of each completion; "recorded", "sampler_ids" and those that a search proposes.
        prefixes: reading of each document's prompt, in place of the configuration's; None: as that says.
        passes: forward passes so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        documents: Sequence[Document],
        *,
        vocabulary: Sequence[str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.all_documents, self.device = list(documents), torch.device(device)
        self.chosen, self.vocabulary = list(range(len(documents))), vocabulary
        self._sources: dict[str, Any] = {CURRENT: trainer.model, **trainer.older}
        self.adapter: Adapter | None = None if trainer.adapter is None else read_adapter(trainer.adapter)
        self.readings: dict[str, list[tuple[int, ...]]] = {RECORDED: [d.completion for d in documents]}
        if documents[0].sampler_ids is not None:
            self.readings["sampler_ids"] = [d.sampler_ids or () for d in documents]
        self.passes = 0
        self.prefixes: list[str] | None = None
        self._tables: dict[str, list[str]] = {}
        self._heads: OrderedDict[tuple[Any, ...], tuple[Any, Tensor, Tensor | None]] = OrderedDict()
        self._models: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._start()
        self.base = self._read(CURRENT)
        self.config = self.base.config.get_text_config()
        self._check_ids()

    def _start(self) -> None:
        self.documents = [self.all_documents[n] for n in self.chosen]
        lengths_N = torch.tensor([len(d.completion) for d in self.documents])
        self.document_T = torch.repeat_interleave(torch.arange(len(self.documents)), lengths_N)
        self.counted_T = torch.cat([d.counted_C for d in self.documents])
        self._states: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
        self._columns: dict[Configuration, Tensor] = {}
        self._exact: dict[Configuration, Tensor] = {}
        self._openings: OrderedDict[tuple[Any, ...], Computation] = OrderedDict()

    def part(self, numbers: Sequence[int]) -> Computation:
        """Return a computation of some documents, on the same models; each reading of a prompt sees all documents."""
        few = copy.copy(self)
        few.chosen = [self.chosen[n] for n in numbers]
        few.readings = {name: [ids[n] for n in numbers] for name, ids in self.readings.items()}
        few._tables = {name: [table[n] for n in numbers] for name, table in self._tables.items()}
        few.prefixes = self.prefixes and [self.prefixes[n] for n in numbers]
        few._start()
        return few

    def add_prefixes(self, names: Sequence[str]) -> str:
        """Add a reading in which each document has its own reading of the prompt, and return its name."""
        own = [name for name, table in self._tables.items() if table == list(names)]
        if not own:
            own = [f"each:{len(self._tables)}"]
            self._tables[own[0]] = list(names)
        return own[0]

    # ---- models ----------------------------------------------------------------------------------------

    @property
    def older(self) -> list[str]:
        """Names of the older checkpoints."""
        return [name for name in self._sources if name != CURRENT]

    @property
    def mixture(self) -> bool:
        """True if the model has routers of experts."""
        return bool(self._routers)

    @property
    def routes_recorded(self) -> bool:
        """True if the sampler's routes are in the record, and the model's routers can take them."""
        return self.all_documents[0].routes is not None and all(map(has_known_gates, self._routers))

    @property
    def _routers(self) -> list[nn.Module]:
        return [module for module in self.base.modules() if type(module).__name__.endswith("Router")]

    def _load(self, name: str) -> Any:
        """A model of the caller's own: a copy of the one that is kept, where the current weights are asked for."""
        return copy.deepcopy(self.base) if name == CURRENT else self._read(name)

    def _masters(self, name: str) -> Any:
        """A model in float32 to read from."""
        return self.base if name == CURRENT else self._read(name)

    def _read(self, name: str) -> Any:
        source = self._sources[name]
        if isinstance(source, nn.Module):
            return copy.deepcopy(source).float().eval()
        return load_decoder(str(source)).eval()

    def model(self, configuration: Configuration) -> Any:
        """Build the model of a configuration."""
        key = configuration.model_key
        if key not in self._models:
            model = self._load(configuration.weights).requires_grad_(False)
            dtype = DTYPES[configuration.precision]
            if self.adapter is not None and configuration.weights == CURRENT:
                model = apply_adapter(model, self.adapter, configuration.lora, dtype)
            model.set_attn_implementation(configuration.attention)
            if hasattr(model, "set_experts_implementation") and self.mixture:
                model.set_experts_implementation("eager")
            model = lift_to_float64(model) if dtype == torch.float64 else cast(model, dtype)
            add_updates(use_gemms(model, configuration.gemms))
            install_router(model, configuration.router)
            self._models[key] = model.to(self.device)
            while len(self._models) > KEPT_MODELS and sum(map(_bytes_of, self._models.values())) > KEPT_BYTES:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]

    # ---- columns ---------------------------------------------------------------------------------------

    def column(self, configuration: Configuration) -> Tensor:
        """Log-probabilities of all completions' tokens, in nats; NaN where a reading has none. Shape: [T] float64."""
        if configuration not in self._columns:
            self._columns[configuration] = self._column(configuration)
        return self._columns[configuration]

    def exact_column(self, configuration: Configuration) -> Tensor:
        """Column in float64 throughout, of the weights as the configuration rounds them. Shape: [T] float64."""
        if configuration not in self._exact:
            self._exact[configuration] = self._exact_column(configuration)
        return self._exact[configuration]

    def _exact_column(self, configuration: Configuration) -> Tensor:
        few = self.part(range(len(self.documents)))
        few._models, few._heads = OrderedDict(), OrderedDict()
        _, weight_VD, bias_V = self.head(configuration)
        exact = configuration.with_changes({"precision": "float64", "head": "float64"})
        # lifted routers have a forward of their own; what the configuration changed of them is in their attributes
        model = install_router(lift_to_float64(copy.deepcopy(self.model(configuration))), "own")
        few._models[exact.model_key] = model
        few._heads[(*exact.model_key, exact.head)] = (
            model,
            weight_VD.double(),
            None if bias_V is None else bias_V.double(),
        )
        return few.column(exact)

    def assembled(self, base: Configuration, switches: Sequence[Any], *, exact: bool = False) -> Tensor:
        """Column of a configuration after switches, of which some act in some documents only. Shape: [T] float64.

        ``exact``: in float64 throughout, of the weights as they are rounded.
        """
        column = self.exact_column if exact else self.column
        by_document: list[Configuration] = []
        for number in range(len(self.documents)):
            changed = base
            for switch in switches:
                if switch.documents is None or number in switch.documents:
                    changed = changed.with_changes(switch.changes)
            by_document.append(changed)
        column_T = torch.full((len(self.document_T),), torch.nan, dtype=torch.float64)
        for configuration in dict.fromkeys(by_document):
            of_it = torch.tensor([one == configuration for one in by_document])[self.document_T]
            column_T[of_it] = column(configuration)[of_it]
        return column_T

    def openings(self, tokens: str, names: Sequence[str], numbers: Sequence[int], first: int) -> Computation:
        """Part of the first tokens of some documents, all with the first reading of their prompts, then with the next.

        The last ones are kept: states of a search that differ in other things ask for the same passes.
        """
        key = (tokens, tuple(names), tuple(numbers), first)
        if key not in self._openings:
            few = self.part([n for _ in names for n in numbers])
            few.readings = {tokens: [ids[:first] for ids in few.readings[tokens]]}
            few.prefixes = [name for name in names for _ in numbers]
            self._openings[key] = few
            while len(self._openings) > KEPT_PARTS:
                self._openings.popitem(last=False)
        self._openings.move_to_end(key)
        return self._openings[key]

    def _column(self, configuration: Configuration) -> Tensor:
        return self._aligned(self.values(configuration), configuration)

    def values(self, configuration: Configuration) -> Tensor:
        """Log-probabilities of the tokens of a reading, one completion after another. Shape: [T'] float64."""
        values = []
        shift = {"logits +1": 1, "logits -1": -1}.get(configuration.offset, 0)
        for logits_RV, tokens_R in self._logits(configuration, shift):
            values.append(
                recorded_quantity(
                    logits_RV,
                    tokens_R.to(logits_RV.device),
                    temperature=configuration.temperature,
                    sampling=configuration.sampling,
                    logprobs=configuration.logprobs,
                    softmax_dtype=logits_RV.dtype if configuration.head_dtype.endswith("_softmax") else None,
                )
            )
        return torch.cat(values).cpu()

    def logits_of(self, configuration: Configuration, at_T: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and tokens of some places of all completions, in the order of ``at_T``; the recorded tokens only.

        Shapes: [n] -> [n, V], [n].
        """
        states_RD, rows_T, tokens_T = self._states_of(configuration)
        shift = {"logits +1": 1, "logits -1": -1}.get(configuration.offset, 0)
        logits_TV = self._head(configuration, states_RD[rows_T[at_T] + shift])
        return logits_TV, tokens_T[at_T].to(logits_TV.device)

    def _aligned(self, value_T: Tensor, configuration: Configuration) -> Tensor:
        """Values of a reading at the places of the recorded completions."""
        parts = []
        sizes = [len(ids) for ids in self.readings[configuration.tokens]]
        empty = configuration.prefix == "none"
        for document, own_C in zip(self.documents, value_T.split(sizes), strict=True):
            count = len(document.completion)
            nan = own_C.new_full((1,), torch.nan)
            if empty:
                own_C = torch.cat([nan, own_C[1:]])
            if configuration.offset == "values +1":
                own_C = torch.cat([own_C[1:], nan])
            elif configuration.offset == "values -1":
                own_C = torch.cat([nan, own_C[:-1]])
            parts.append(torch.cat([own_C[:count], nan.expand(max(0, count - len(own_C)))]))
        return torch.cat(parts)

    def _logits(self, configuration: Configuration, shift: int) -> Any:
        states_RD, rows_T, tokens_T = self._states_of(configuration)
        step = max(1, LOGITS // self.config.vocab_size)
        for rows, tokens in zip(rows_T.split(step), tokens_T.split(step), strict=True):
            yield self._head(configuration, states_RD[rows + shift]), tokens

    def _head(self, configuration: Configuration, states_RD: Tensor) -> Tensor:
        source, weight_VD, bias_V = self.head(configuration)
        dtype, arguments = weight_VD.dtype, head_of(source)
        with torch.no_grad():
            layer = source.get_output_embeddings()
            product_RV = states_RD.to(dtype) @ weight_VD.T
            update = update_of(layer, states_RD.to(dtype))
            if update is not None:
                product_RV = product_RV + update
            if bias_V is not None:
                product_RV = product_RV + bias_V
            logits_RV = product_RV if arguments["logit_scale"] == 1 else product_RV * arguments["logit_scale"]
            cap = arguments["soft_cap"]
            return logits_RV if cap is None else cap * torch.tanh(logits_RV / cap)

    def head(self, configuration: Configuration) -> tuple[Any, Tensor, Tensor | None]:
        """Model, weight [V, D] and bias [V] of the output head, in the head's dtype."""
        key = (*configuration.model_key, configuration.head)
        if key not in self._heads:
            name = configuration.head_dtype
            dtype = DTYPES[name.removesuffix("_softmax").removesuffix("_masters")]
            source = self.model(configuration)
            masters = self._masters(configuration.weights) if name == "float32_masters" else source
            arguments = head_of(masters)
            bias_V = None if arguments["bias_V"] is None else arguments["bias_V"].to(self.device, dtype)
            self._heads[key] = (source, arguments["weight_VD"].detach().to(self.device, dtype), bias_V)
            while len(self._heads) > KEPT_MODELS:
                self._heads.popitem(last=False)
        return self._heads[key]

    def _states_of(self, configuration: Configuration) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of all rows, the row that predicts each token, and the tokens. Shapes: [R, D], [T'], [T']."""
        ids = self.readings[configuration.tokens]
        counts = torch.tensor([len(one) for one in ids])
        starts = torch.cumsum(counts + 2, 0) - (counts + 2)
        rows_T = torch.cat([torch.arange(int(c)) + int(s) + 1 for c, s in zip(counts, starts, strict=True)])
        tokens_T = torch.tensor([token for one in ids for token in one])
        key = configuration.trunk_key
        if key not in self._states:
            self._states[key] = self._pass(configuration, ids)
            while len(self._states) > KEPT_STATES or (
                len(self._states) > 2 and sum(s.numel() * s.element_size() for s in self._states.values()) > KEPT_BYTES
            ):
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return self._states[key], rows_T, tokens_T

    def _pass(self, configuration: Configuration, ids: Sequence[tuple[int, ...]]) -> Tensor:
        model, states = self.model(configuration), []
        names = self.prefixes or self._tables.get(configuration.prefix) or [configuration.prefix] * len(self.chosen)
        fronts = [read_prefix(name, self.all_documents, n) for name, n in zip(names, self.chosen, strict=True)]
        rows = [(*front, *own) for front, own in zip(fronts, ids, strict=True)]
        for numbers in batches([len(row) for row in rows]):
            longest = max(len(rows[n]) for n in numbers)
            tokens = torch.tensor([[*rows[n], *[0] * (longest - len(rows[n]))] for n in numbers], device=self.device)
            given = None
            if configuration.routes == "recorded":
                given = self._routes(numbers, longest)
            with torch.no_grad(), replay(model, given):
                self.passes += 1
                hidden_NTD = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.clone()
            for at, n in enumerate(numbers):
                first, count = len(fronts[n]) - 2, len(ids[n]) + 2
                index = (torch.arange(count) + first).clamp(min=0, max=len(rows[n]) - 1)
                states.append((n, hidden_NTD[at, index.to(self.device)]))
        return torch.cat([one for _, one in sorted(states, key=lambda pair: pair[0])]).clone()

    def _routes(self, numbers: Sequence[int], longest: int) -> Tensor:
        from workbench.policy.routers import NO_ROUTE

        some = self.documents[0].routes
        assert some is not None
        given = torch.full((len(numbers), longest, *some.shape[1:]), NO_ROUTE)
        for at, n in enumerate(numbers):
            own = self.documents[n].routes
            assert own is not None
            given[at, : min(len(own), longest)] = own[:longest]
        return given.flatten(0, 1).to(self.device)

    def _check_ids(self) -> None:
        size = self.config.vocab_size
        largest = max(max((*d.prompt, *d.completion, *(d.sampler_ids or ()))) for d in self.documents)
        if largest >= size:
            raise SpecError(
                "recompute the record",
                found=f"id {largest} in the rollouts, and a vocabulary of {size}",
                rule="the checkpoint's own vocabulary",
                fix="give the checkpoint with which the rollouts were scored",
            )
        limit = getattr(self.config, "max_position_embeddings", None)
        longest = max(len(d.prompt) + len(d.completion) for d in self.documents)
        if limit is not None and longest > limit:
            raise SpecError(
                "recompute the record",
                found=f"{longest} tokens in a document, and {limit} positions",
                rule="documents that the model can read",
                fix="leave longer documents out",
            )


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows, longest first, so that each group has at most `TOKENS` with its padding."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    groups: list[list[int]] = []
    for n in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= TOKENS:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _bytes_of(model: nn.Module) -> int:
    return sum(values.numel() * values.element_size() for values in model.parameters())
