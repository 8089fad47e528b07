"""The model in the package: small enough, complete, and good over its whole context."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import minibatcher

FOLDER = Path(minibatcher.__file__).parent / "model" / "bard"
CONFIG = json.loads((FOLDER / "config.json").read_text())
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
BOS, EOT = CONFIG["bos_token_id"], CONFIG["eos_token_id"]

# From The Two Gentlemen of Verona, one of the two plays held out of training.
OPENING = [
    """VALENTINE: Cease to persuade, my loving Proteus:
Home-keeping youth have ever homely wits.
Were't not affection chains thy tender days
To the sweet glances of thy honour'd love,
I rather would entreat thy company
To see the wonders of the world abroad,
Than, living dully sluggardized at home,
Wear out thy youth with shapeless idleness.
But since thou lovest, love still and thrive therein,
Even as I would when I to love begin.""",
    """PROTEUS: Wilt thou be gone? Sweet Valentine, adieu!
Think on thy Proteus, when thou haply seest
Some rare note-worthy object in thy travel:
Wish me partaker in thy happiness
When thou dost meet good hap; and in thy danger,
If ever danger do environ thee,
Commend thy grievance to my holy prayers,
For I will be thy beadsman, Valentine.""",
]
LATER = [
    """PROTEUS: He after honour hunts, I after love:
He leaves his friends to dignify them more,
I leave myself, my friends and all, for love.
Thou, Julia, thou hast metamorphosed me,
Made me neglect my studies, lose my time,
War with good counsel, set the world at nought;
Made wit with musing weak, heart sick with thought.""",
    "SPEED: Sir Proteus, save you! Saw you my master?",
    "PROTEUS: But now he parted hence, to embark for Milan.",
    """SPEED: Twenty to one then he is shipp'd already,
And I have play'd the sheep in losing him.""",
    """PROTEUS: Indeed, a sheep doth very often stray,
An if the shepherd be a while away.""",
]


def encode(speeches: list[str]) -> list[int]:
    return [
        token for speech in TOKENIZER.encode_batch(speeches, add_special_tokens=False) for token in (*speech.ids, EOT)
    ]


def test_folder_is_small_and_complete():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "README.md", "train.py"} <= sizes.keys()
    assert sum(sizes.values()) < 8e6


def test_config_and_special_tokens():
    assert CONFIG["max_position_embeddings"] == 2048
    assert TOKENIZER.get_vocab_size() == CONFIG["vocab_size"] == 2048
    for token, key in (("<|bos|>", "bos_token_id"), ("<|eot|>", "eos_token_id"), ("<|pad|>", "pad_token_id")):
        assert TOKENIZER.token_to_id(token) == CONFIG[key]
        assert TOKENIZER.encode(token, add_special_tokens=False).ids == [CONFIG[key]]


@given(st.text(st.characters(codec="utf-8")))
def test_tokenizer_round_trips_any_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_a_prompt_begins_a_scene():
    with_special = TOKENIZER.encode("HAMLET:").ids
    assert with_special == [BOS, *TOKENIZER.encode("HAMLET:", add_special_tokens=False).ids]


def test_tokenizer_knows_the_plays():
    text = "\n".join(OPENING)
    assert len(text) / len(TOKENIZER.encode(text).ids) > 2.5


def test_card_states_the_measured_figures():
    metrics = json.loads((FOLDER / "metrics.json").read_text(encoding="utf-8"))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    figures = [*metrics["loss"].values(), *metrics["held_out_loss_by_position"].values()]
    figures += [length for row in metrics["lengths"].values() for length in row.values()]
    assert all(f" {figure} |" in card for figure in figures)
    assert all(sample in card for sample in metrics["samples"])


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def losses(model, ids: list[int]) -> list[float]:
    """Loss in nats of every token but the first."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()


def test_loss_on_a_play_it_has_not_seen(model):
    ids = [BOS, *encode(OPENING)][:257]
    assert len(ids) > 200
    assert sum(losses(model, ids)) / (len(ids) - 1) < 4.0


def test_loss_holds_beyond_position_1024(model):
    later, opening = encode(LATER), encode(OPENING)
    before = [BOS, *opening * (1300 // len(opening))]
    assert len(before) > 1024 and len(before) + len(later) <= 2048
    early = sum(losses(model, [BOS, *later])) / len(later)
    late = sum(losses(model, [*before, *later])[-len(later) :]) / len(later)
    assert late < 4.0
    assert late < early + 0.2  # the same text is not harder to read far down the context


def test_speeches_end_by_themselves(model):
    import torch

    prompt = torch.tensor([[BOS, *TOKENIZER.encode("HAMLET:", add_special_tokens=False).ids]])
    rows = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        top_k=0,
        num_return_sequences=16,
        max_new_tokens=300,
    )
    lengths = [row.tolist().index(EOT) if EOT in row else None for row in rows]
    ended = [length for length in lengths if length is not None]
    assert len(ended) >= 12
    assert max(ended) > 2 * min(ended)
