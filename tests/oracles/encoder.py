"""One optimizer step with images the long way: stock models, one document at a time, pixels to loss in one graph.

The vision model is a stock one of `transformers` with its attention written out (the stock eager one takes its softmax
in float32); the projector is a norm, a layer, a GELU and a layer, written out too. `reads[d][t]` is (image, feature) or
None: what stands in the place of token t of document d.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import AttentionInterface


def written_out(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention of every feature to all features of its image, image by image and head by head."""
    images = []
    for q, k, v in zip(query, key, value, strict=True):
        heads = [torch.softmax(q[h] @ k[h].T * scaling, dim=1) @ v[h] for h in range(len(q))]
        images.append(torch.stack(heads, dim=1))
    return torch.stack(images), None


class Reader(nn.Module):
    """A decoder that reads features in the places of some tokens; takes documents as token ids, like a plain one."""

    def __init__(self, vision, projector, decoder, pixels, documents, reads):
        super().__init__()
        self.vision, self.decoder = vision.double(), decoder
        self.projector = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(value.detach().double().clone()) for name, value in projector.items()}
        )
        AttentionInterface.register("oracle_images", written_out)
        vision.set_attn_implementation("oracle_images")
        self.pixels, self.documents, self.reads = pixels.double(), documents, reads
        self.turn = 0

    def features(self, image):
        """Return the features of an image that the decoder reads."""
        hidden = self.vision(pixel_values=self.pixels[image : image + 1]).last_hidden_state[0]
        p = self.projector
        centred = hidden - hidden.mean(dim=1, keepdim=True)
        normed = centred / torch.sqrt((centred**2).mean(dim=1, keepdim=True) + 1e-5) * p["norm_weight"] + p["norm_bias"]
        inner = normed @ p["fc1_weight"].T + p["fc1_bias"]
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        return inner @ p["fc2_weight"].T + p["fc2_bias"]

    def forward(self, input_ids, use_cache=False):
        """Logits of the next document in turn."""
        number = self.turn % len(self.documents)
        self.turn += 1
        assert input_ids[0].tolist() == self.documents[number]["tokens"], "documents come in their order"
        words = self.decoder.get_input_embeddings()(input_ids[0])
        made = {image: self.features(image) for image in {read[0] for read in self.reads[number] if read}}
        rows = [words[t] if read is None else made[read[0]][read[1]] for t, read in enumerate(self.reads[number])]
        return self.decoder(inputs_embeds=torch.stack(rows)[None], use_cache=use_cache)


def named_as_ours(gradients):
    """Gradients of `Reader` under the names of a step with two modules."""
    named = {}
    for name, gradient in gradients.items():
        part, _, rest = name.partition(".")
        if part == "projector":
            rest = rest.replace("_", ".")
        named[rest if part == "decoder" else f"encoder.{part}.{rest}"] = gradient
    return named
