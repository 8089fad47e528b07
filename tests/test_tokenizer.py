import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from minibatcher.errors import InvalidParameter, ModelError
from minibatcher.model.detokenizer import IncrementalDetokenizer
from minibatcher.model.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("o", "p"), ("ðŁ", "ĺ"), ("ð", "Ł")]
    merges = [("ð", "Ł"), *merges[:-1]]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<tool call>"])  # added but not special, with a character that is no byte's spelling
    return Tokenizer(backend, eos_token_ids=(backend.token_to_id("<|end|>"),))


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: pieces with a mark for the space, and byte tokens for what has no piece."""
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "t", "h", "e", "▁t", "th", "▁the", "o", "p"]
    vocab = {token: i for i, token in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "t"), ("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


BYTES, FALLBACK = byte_level(), byte_fallback()
ids_of_bytes = st.lists(st.integers(0, BYTES.vocab_size + 2), max_size=40)  # with ids beyond the vocabulary


def stream(tokenizer, ids, stop=(), min_tokens=0):
    """Pieces as they come out, the last from finish(), and the detokenizer."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop, min_tokens)
    pieces = [detokenizer.add(i) for i in ids]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer


@given(st.text())
def test_round_trip(text):
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    pieces, _ = stream(BYTES, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(ids_of_bytes)
def test_pieces_join_to_the_whole(ids):
    assert "".join(stream(BYTES, ids)[0]) == BYTES.decode(ids)


@example("p o")  # a mark for the space that is a token by itself
@example("\x800")  # two runs of byte tokens next to each other
@given(st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the top é😀"))))
def test_pieces_join_to_the_whole_with_byte_fallback(text):
    ids = FALLBACK.encode(text)
    pieces, _ = stream(FALLBACK, ids)
    assert "".join(pieces) == FALLBACK.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_no_half_characters():
    ids = BYTES.encode("é😀")
    assert len(ids) > 2
    pieces, _ = stream(BYTES, ids)
    assert [piece for piece in pieces if piece] == ["é", "😀"]


def test_a_broken_end_comes_out_at_the_end():
    ids = BYTES.encode("a😀")[:-1]
    pieces, _ = stream(BYTES, ids)
    assert pieces[:-1] == ["a"] + [""] * (len(ids) - 1) and pieces[-1] == "\ufffd" == BYTES.decode(ids)[1:]


def test_garbage_does_not_pile_up_with_byte_fallback():
    detokenizer = IncrementalDetokenizer(FALLBACK)
    for _ in range(300):
        detokenizer.add(FALLBACK.backend.token_to_id("<0xE2>"))
    assert len(detokenizer.text) > 200


def test_special_tokens_are_left_out_and_added_ones_kept():
    end, tool = BYTES.backend.token_to_id("<|end|>"), BYTES.backend.token_to_id("<tool call>")
    assert BYTES.special_ids == {end}
    ids = [*BYTES.encode("o"), end, tool, *BYTES.encode("p")]
    assert stream(BYTES, ids)[1].text == BYTES.decode(ids) == "o<tool call>p"


def word_piece() -> Tokenizer:
    """BERT's kind: words, and pieces that go on with a word."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "[SEP]", "a", "the", "##re", "é"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


@given(st.text())
def test_the_bytes_of_tokens_join_to_those_of_the_text(text):
    assert b"".join(map(BYTES.token_bytes, BYTES.encode(text))) == text.encode()
    pieces = b"".join(map(FALLBACK.token_bytes, FALLBACK.encode(text)))
    assert pieces == (f" {text}" if text else "").replace("▁", " ").encode()


def test_a_token_alone_is_shown_with_its_space_and_a_special_one_by_its_name():
    end, tool, beyond = BYTES.eos_token_ids[0], BYTES.backend.token_to_id("<tool call>"), BYTES.vocab_size
    assert [BYTES.token_text(i) for i in (*BYTES.encode(" the"), end, tool, beyond)] == [
        " the",
        "<|end|>",
        "<tool call>",
        "",
    ]
    assert [BYTES.token_bytes(i) for i in (end, tool, beyond)] == [b"", b"<tool call>", b""]
    assert [BYTES.token_text(i) for i in BYTES.encode("😀")] == ["\ufffd", "\ufffd"]
    assert b"".join(map(BYTES.token_bytes, BYTES.encode("😀"))) == "😀".encode()

    def of(tokenizer, names):
        ids = [tokenizer.backend.token_to_id(name) for name in names]
        return [(tokenizer.token_text(i), tokenizer.token_bytes(i)) for i in ids]

    assert of(FALLBACK, ["▁the", "th", "▁", "<0x0A>", "<0xE2>", "<s>"]) == [
        (" the", b" the"),
        ("th", b"th"),
        (" ", b" "),
        ("\n", b"\n"),
        ("\ufffd", b"\xe2"),
        ("<s>", b""),
    ]
    assert of(word_piece(), ["the", "##re", "é", "[SEP]"]) == [
        (" the", b" the"),
        ("re", b"re"),
        (" é", " é".encode()),
        ("[SEP]", b""),
    ]


def simple_stream(text, stops):
    """What should come out of `text` given character by character: the stop string that is complete first wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text(alphabet="abé", max_size=25),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_stop_strings(text, stops):
    ids = BYTES.encode(text)
    wanted, stop = simple_stream(text, stops)
    detokenizer = IncrementalDetokenizer(BYTES, stops)
    for token in ids:
        detokenizer.add(token)
        shown = detokenizer.text
        assert wanted.startswith(shown)  # nothing of a stop string has ever been out
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stopped) == (wanted, stop)
    assert detokenizer.add(ids[0] if ids else 0) == "" or stop is None


def test_stop_string_across_tokens_and_inside_one():
    the = BYTES.encode(" the")
    assert len(the) == 1
    pieces, detokenizer = stream(
        BYTES, [*BYTES.encode("o"), *BYTES.encode("p"), *the, *BYTES.encode("op")], stop=("p t",)
    )
    assert (pieces == ["", "o", "", ""] and detokenizer.stopped == "p t") or detokenizer.text == "o"
    assert stream(BYTES, [*BYTES.encode("o"), *the], stop=("h",))[1].text == "o t"


def test_held_back_text_comes_when_it_was_no_stop_string():
    detokenizer = IncrementalDetokenizer(BYTES, stop=("oooX",))
    out = [detokenizer.add(token) for token in BYTES.encode("oooop")]
    assert "".join(out) == BYTES.decode(BYTES.encode("oooop")) and out[0] == ""
    detokenizer = IncrementalDetokenizer(BYTES, stop=("oX",))
    assert detokenizer.add(BYTES.encode("o")[0]) == "" and detokenizer.finish() == "o"


def test_min_tokens():
    ids = BYTES.encode("aXbXc")
    assert stream(BYTES, ids, stop=("X",))[1].text == "a"
    early = stream(BYTES, ids, stop=("X",), min_tokens=3)[1]
    assert (early.text, early.stopped) == ("aXb", "X")
    late = stream(BYTES, ids, stop=("X",), min_tokens=5)[1]
    assert (late.text, late.stopped) == ("aXbXc", None)
    # A match that began too early but is complete in time counts.
    assert stream(BYTES, BYTES.encode("aXYc"), stop=("XY",), min_tokens=3)[1].text == "a"


def test_cost_per_token_does_not_grow():
    calls = []

    class Counting(Tokenizer):
        def decode(self, ids):
            calls.append(len(ids))
            return super().decode(ids)

    stream(Counting(FALLBACK.backend), FALLBACK.encode("the top é " * 100))
    assert max(calls) < 12


def test_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    BYTES.backend.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}'
        '{% if add_generation_prompt %}[me]{% endif %}{{ eos_token }}"}'
    )
    loaded = Tokenizer.from_file(path)
    assert loaded.encode("the op") == BYTES.encode("the op") and loaded.vocab_size == BYTES.vocab_size
    pytest.importorskip("jinja2")
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == "[user]hi[me]"
    with pytest.raises(InvalidParameter, match="no chat template"):
        BYTES.apply_chat_template([])
    path.write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.from_file(path)
