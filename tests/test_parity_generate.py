"""Folders written by transformers: the engine's greedy tokens are those of `transformers.generate`."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_model import TINY  # noqa: E402

from minibatcher import LLM, SamplingParams  # noqa: E402

CASES = list(itertools.product(["Llama", "Qwen2", "Qwen3"], ["float32", "bfloat16"], [True, False], ["1GB", "40KB"]))


@pytest.mark.parametrize("family, dtype, tied, shard", CASES)
def test_greedy_tokens_equal_those_of_transformers(family, dtype, tied, shard, tmp_path):
    torch.manual_seed(len(family) + tied)
    config = getattr(transformers, f"{family}Config")(**TINY, tie_word_embeddings=tied, eos_token_id=1)
    model = type_of(family)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    del model

    # Both compute in float32, whatever the file holds: in bfloat16 near ties would make equality a matter of luck.
    reference = type_of(family).from_pretrained(tmp_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, TINY["vocab_size"], (n,), generator=generator).tolist() for n in (5, 31, 1, 17)]
    expected = [
        reference.generate(torch.tensor([p]), do_sample=False, max_new_tokens=24, pad_token_id=0)[0, len(p) :].tolist()
        for p in prompts
    ]
    for strategy in ("static", "chunked"):
        llm = LLM(str(tmp_path), strategy=strategy, dtype="float32", max_num_batched_tokens=16)
        done = llm.generate(prompts, SamplingParams(max_tokens=24))
        assert [completion.token_ids for completion in done] == expected
    assert len(set(map(tuple, expected))) == len(prompts)


def type_of(family: str):
    return getattr(transformers, f"{family}ForCausalLM")
