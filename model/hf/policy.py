"""A causal language model of `transformers` with the interface of our own policy.

Trainers call it with documents laid end to end, the inference engine extends the sequences of a cache; both
run tokens packed through the model's own layers, with our attention in between. When a policy is made, its
logits are compared with those of the unchanged model: an architecture that does anything of its own in its
attention or head is refused, and not approximated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model.batch import PackedTokens
from model.hf import attention
from model.hf.adapters import add_adapters, is_adapter, plain_name
from model.hf.attention import CachedRows, Documents, Rows
from model.hf.cache import HFCache
from model.hf.settings import HFPolicyError, HFShape, LoraSettings
from model.policy import PolicyAux, PolicyOutput

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Largest difference of logits from the unchanged model's, relative to the largest logit."""


class HFPolicy(nn.Module):
    """The network; state and parameters are named as in the model, without a prefix.

    With adapters, `state_dict` and the trainable parameters are the adapters' alone.

    Args:
        model: an `AutoModelForCausalLM` with its weights; it is changed (attention, adapters).
        lora: adapters to add; None trains all weights.

    Raises:
        HFPolicyError: The model does something that this policy does not reproduce.
    """

    def __init__(self, model: Any, lora: LoraSettings | None = None) -> None:
        super().__init__()
        self.config = HFShape.of(model.config)
        self.lora = lora
        self.base = ""
        """The folder that the weights come from, if any; adapters are of no use without it."""
        self._recompute = False
        model.eval()
        _use_our_attention(model)
        self.model = model if lora is None else add_adapters(model, lora)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    @property
    def head(self) -> Any:
        """The layer that makes logits."""
        return self.model.get_output_embeddings()

    @property
    def fake_quant(self) -> bool:
        """Keys are never rounded."""
        return False

    @fake_quant.setter
    def fake_quant(self, value: bool) -> None:
        _refuse(value, "rounds no keys: set trainer.fake_quant=false and sft.fake_quant=false")

    @property
    def exact(self) -> bool:
        """The last bits of a result depend on what is computed beside it."""
        return False

    @exact.setter
    def exact(self, value: bool) -> None:
        _refuse(value, "has no exact mode: set model.exact=false")

    def set_recompute(self, value: bool) -> None:
        """Whether activations of a layer are computed again in the backward pass and not kept."""
        if value == self._recompute:
            return
        if value and not self.model.supports_gradient_checkpointing:
            raise HFPolicyError(
                f"{type(self.model).__name__} cannot compute activations again: set recompute=false"
            )
        word = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
        if value:
            getattr(self.model, f"{word}_checkpointing_enable")({"use_reentrant": False})
        else:
            getattr(self.model, f"{word}_checkpointing_disable")()
        self.model.train(value)  # a layer recomputes in training mode only; it drops nothing
        self._recompute = value

    def forward(
        self, tokens: PackedTokens, *, indexer_loss: Any = False, features: bool = False
    ) -> PolicyOutput:
        """Runs documents for training; nothing is seen across a document's start."""
        _refuse(indexer_loss, "has no indexer: set indexer_coef=0")
        _refuse(features, "has no drafter: set draft.anchors=0")
        _refuse(tokens.images is not None, "takes no images")
        _refuse(tokens.choices is not None, "repeats no choices: set trainer.replay_choices=off")
        hidden = self._run(tokens.token_ids, Documents(tokens.cu_seqlens))
        zero = torch.zeros((), device=hidden.device)
        loads = torch.zeros(self.config.num_hidden_layers, 0, device=hidden.device)
        return PolicyOutput(hidden, PolicyAux(loads, None, zero, None))

    def _run(self, token_ids: Tensor, rows: Rows) -> Tensor:
        positions: Tensor = rows.positions  # pyright: ignore[reportAttributeAccessIssue]
        output = self.model.get_decoder()(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, rows=rows
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor, *, frozen: bool = False) -> Tensor:
        """[..., d] to float32 [..., V]; `frozen` sends no gradient to the head's weight."""
        weight: Tensor = self.head.weight
        if frozen:
            weight = weight.detach()
        if hidden.dtype is not torch.float32:
            return hidden.float() @ weight.float().t()
        return hidden @ weight.t()

    def new_cache(
        self, max_sequences: int, max_tokens: int, *, storage: str = "dense", pages: int | None = None
    ) -> HFCache:
        """An empty cache for `max_sequences` sequences of up to `max_tokens` tokens each."""
        _refuse(storage != "dense" or pages is not None, "keeps keys as floats: set engine.storage=dense")
        return HFCache(self.config.num_hidden_layers, max_sequences, max_tokens, self.device)

    def extend(self, cache: HFCache, slots: Tensor, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Appends tokens to cached sequences.

        Args:
            cache: holds the sequences.
            slots: [B] int64, each sequence once.
            token_ids: [B, L] int64; row b counts up to `lengths[b]`.
            lengths: [B] int64, 1 .. L.

        Returns:
            [B, d], the head's input for the last new token of each sequence.

        Raises:
            CacheFull: A sequence would outgrow its slot; nothing has been written.
        """
        slot_list, counts = slots.tolist(), lengths.tolist()
        starts = cache.make_room(slot_list, counts)
        inside = torch.arange(token_ids.shape[1], device=slots.device) < lengths[:, None]
        hidden = self._run(token_ids[inside], CachedRows(cache, slots, starts, counts))
        cache.advance(slot_list, counts)
        return hidden[lengths.cumsum(0) - 1]

    def on_host(self, tensors: Mapping[str, Tensor]) -> HFPolicy:
        """A policy like this one, made of these tensors (named as by `state_dict`), to be written to disk."""
        twin = object.__new__(HFPolicy)
        nn.Module.__init__(twin)
        twin.config, twin.lora, twin.base, twin._recompute = self.config, self.lora, self.base, False
        with torch.device("meta"):
            twin.model = type(self.model)(self.model.config)
            if self.lora is not None:
                twin.model = add_adapters(twin.model, self.lora)
        twin.load_state_dict(tensors, assign=True)
        return twin

    def look_back_ids(self, token_ids: Tensor, image: Tensor | None = None) -> Tensor:
        """Nothing looks back."""
        return token_ids[:0]

    def encode_image(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Raises HFPolicyError: text only."""
        raise HFPolicyError("policy=hf takes no images: give it an environment of text")

    def update_balance(self, load: Tensor, image_load: Tensor | None = None) -> None:
        """Nothing: the router of such a model has no bias that is moved by loads."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, without a prefix of this wrapper; with adapters, theirs alone."""
        for name, parameter in self.model.named_parameters(prefix, recurse, remove_duplicate):
            if self.lora is None or is_adapter(name):
                yield plain_name(name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """What a trainer changes, by name: all tensors once, or the adapters'."""
        tied = tied_names(self.model)
        state = self.model.state_dict(*args, **kwargs)
        if self.lora is not None:
            return {plain_name(name): value for name, value in state.items() if is_adapter(name)}
        return {name: value for name, value in state.items() if name not in tied}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes over what `state_dict` gave. Raises HFPolicyError when names differ."""
        own = self.state_dict()
        if wrong := sorted(own.keys() ^ state_dict.keys()):
            raise HFPolicyError(
                f"these are not the weights of this policy: {len(wrong)} names differ, first {wrong[0]}"
            )
        full = dict(state_dict)
        if self.lora is not None:
            names = {plain_name(name): name for name in self.model.state_dict() if is_adapter(name)}
            full = {names[name]: value for name, value in full.items()}
        result = self.model.load_state_dict(full, strict=False, assign=assign)
        if assign:
            self.model.tie_weights()
        return result


def tied_names(model: Any) -> set[str]:
    """Names of parameters that are others under a second name."""
    first: dict[int, str] = {}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    again = {n for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    return again | set(tied)


def _refuse(wrong: object, why: str) -> None:
    if wrong is not False and wrong is not None:
        raise HFPolicyError(f"policy=hf {why}")


@torch.no_grad()
def _use_our_attention(model: Any) -> None:
    """Gives a model our attention, when the result is the same."""
    attention.register()
    name, vocabulary = type(model).__name__, model.config.get_text_config().vocab_size
    if model.device.type == "meta":
        model.set_attn_implementation(attention.NAME)
        return
    ids = torch.arange(3, 3 + 5 * _PROBE_TOKENS, 5, device=model.device) % vocabulary
    theirs = model(input_ids=ids[None], use_cache=False).logits[0].float()
    try:
        model.set_attn_implementation(attention.NAME)
        cut = torch.tensor([0, 5, len(ids)], device=model.device)
        documents = Documents(cut[[0, 2]])
        decoder = model.get_decoder()
        hidden = decoder(
            input_ids=ids[None], position_ids=documents.positions[None], use_cache=False, rows=documents
        ).last_hidden_state[0]
    except (TypeError, ValueError, AttributeError) as error:
        raise HFPolicyError(
            f"{name} cannot be run packed ({error}): policy=hf needs another model"
        ) from error
    ours = hidden.float() @ model.get_output_embeddings().weight.float().t()
    gap = (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-6)
    if not gap <= _TOLERANCE[hidden.dtype]:
        raise HFPolicyError(
            f"{name}: its own logits differ from ours by {gap:.2g} of the largest, so it does something "
            "in its attention, positions or head that policy=hf does not reproduce: take another model"
        )
