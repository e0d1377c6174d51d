"""Decoding captions against transformers' `generate` with the same decoder and weights.

    python docs/benchmarks/captioning.py [--rounds 5] [--words 20] [--vocabulary 1000]

The decoder alone, encoder outputs given to both: 6 layers × 256, 8 heads, 196 image tokens, batch
32. transformers' is GPT-2 with cross-attention, whose weights ours takes; both must say the same
words. Then decoding with the cache against decoding without, 64 words. The floor is the
multiply-adds of the words said over the measured peak of this machine's matrix product.
Needs transformers, which attnkit does not.
"""

import argparse

import torch
import transformers
from measure import alternate, machine, table
from torch.utils.benchmark import Timer
from transformers import GPT2Config, GPT2LMHeadModel

from attnkit.core.operators.multiply_adds import count_multiply_adds
from attnkit.models.captioning.generate import generate
from attnkit.models.captioning.transformer_decoder import TransformerDecoder
from attnkit.models.captioning.word_decoder import END, PAD, START

BATCH, TOKENS, DIM, DEPTH, HEADS, BEAMS = 32, 196, 256, 6, 8, 5


def their_decoder(vocabulary: int, max_words: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max_words,
        n_embd=DIM,
        n_layer=DEPTH,
        n_head=HEADS,
        add_cross_attention=True,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def with_weights_of(theirs: GPT2LMHeadModel) -> TransformerDecoder:
    config = theirs.config
    ours = TransformerDecoder(
        config.vocab_size,
        config.n_positions,
        dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        activation="gelu_tanh",
        norm_eps=config.layer_norm_epsilon,
    )
    their = theirs.transformer.state_dict()
    state = {
        "embedding.weight": their["wte.weight"],
        "head.weight": their["wte.weight"],
        "position_table.table": their["wpe.weight"],
        "norm.weight": their["ln_f.weight"],
        "norm.bias": their["ln_f.bias"],
    }
    for layer in range(DEPTH):
        here, there = f"blocks.{layer}.", f"h.{layer}."
        for ours_name, theirs_name in (
            ("attention_norm", "ln_1"),
            ("cross_norm", "ln_cross_attn"),
            ("mlp_norm", "ln_2"),
            ("attention.in_proj", "attn.c_attn"),
            ("attention.out_proj", "attn.c_proj"),
            ("cross_attention.out_proj", "crossattention.c_proj"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
        ):
            weight = their[f"{there}{theirs_name}.weight"]
            # their projections are stored as [in, out]
            state[f"{here}{ours_name}.weight"] = weight.T if weight.ndim == 2 else weight
            state[f"{here}{ours_name}.bias"] = their[f"{there}{theirs_name}.bias"]
        for kind in ("weight", "bias"):
            query, memory = (
                their[f"{there}crossattention.{n}.{kind}"] for n in ("q_attn", "c_attn")
            )
            parts = zip(("query", "key", "value"), (query, *memory.chunk(2, dim=-1)), strict=True)
            state |= {f"{here}cross_attention.{n}_proj.{kind}": part.T for n, part in parts}
    ours.load_state_dict(state)
    return ours.eval()


def their_words(model: GPT2LMHeadModel, memory, num_words: int, num_beams: int):
    start = torch.full((len(memory), 1), START)
    return model.generate(
        start,
        encoder_hidden_states=memory,
        attention_mask=torch.ones_like(start),
        max_new_tokens=num_words,
        num_beams=num_beams,
        do_sample=False,
        # neither ends: both say all the words
        suppress_tokens=[PAD, START, END],
    )[:, 1:]


def our_words(model: TransformerDecoder, memory, num_words: int, num_beams: int):
    options = {"method": "beam", "num_beams": num_beams} if num_beams > 1 else {}
    return generate(model, memory, max_words=num_words, **options).words


@torch.no_grad()
def our_words_uncached(model: TransformerDecoder, memory, num_words: int):
    """Greedy decoding that runs the decoder on all words so far at each step."""
    words = torch.full((len(memory), 1), START)
    for _ in range(num_words):
        logits = model(memory, words)[:, -1]
        logits[:, [PAD, START]] = -torch.inf
        words = torch.cat([words, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return words[:, 1:]


def never_ending(model: TransformerDecoder) -> None:
    """Make END the unlikeliest word, by a bias of the output layer that theirs has not."""
    bias = torch.zeros(model.vocabulary_size)
    bias[END] = -1e9
    model.head.bias = torch.nn.Parameter(bias)


def peak_multiply_adds(size: int = 1536) -> float:
    """Multiply-adds per second of the best of some products of square matrices, in float32."""
    names = {"a": torch.randn(size, size), "b": torch.randn(size, size)}
    timer = Timer("a @ b", globals=names, num_threads=torch.get_num_threads())
    return size**3 / min(timer.timeit(1).median for _ in range(3))


def floor_seconds(model: TransformerDecoder, memory, num_words: int, num_beams: int) -> float:
    """The multiply-adds of every word's layers, of attention and of the output, over the peak."""
    with torch.no_grad():
        counted = count_multiply_adds(our_words, model, memory, num_words, num_beams)
    return counted / peak_multiply_adds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=1000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    theirs = their_decoder(arguments.vocabulary, max(64, arguments.words))
    ours = with_weights_of(theirs)
    never_ending(ours)
    memory = torch.randn(BATCH, TOKENS, DIM)
    print(f"transformers {transformers.__version__}; {machine()}")
    rows = []
    for name, num_beams in (("greedy", 1), (f"beam {BEAMS}", BEAMS)):
        programs = {
            "transformers": lambda n=num_beams: their_words(theirs, memory, arguments.words, n),
            "attnkit": lambda n=num_beams: our_words(ours, memory, arguments.words, n),
        }
        said = [program() for program in programs.values()]
        same = (said[0] == said[1]).all(dim=1).float().mean()
        times = alternate(programs, arguments.rounds, warm_up=1)
        floor = floor_seconds(ours, memory, arguments.words, num_beams)
        for program in programs:
            rows.append(
                {
                    "decoding": name,
                    "program": program,
                    "median ms": f"{1e3 * times.median(program):.0f}",
                    "words/s": f"{BATCH * arguments.words / times.median(program):.0f}",
                    "speed": f"{times.ratio('transformers', program):.2f} ×",
                    "floor ms": f"{1e3 * floor:.0f}",
                    "same sentences": f"{same:.0%}",
                }
            )
    print(table(rows))
    programs = {
        "uncached": lambda: our_words_uncached(ours, memory, 64),
        "cached": lambda: our_words(ours, memory, 64, 1),
    }
    same = torch.equal(*(program() for program in programs.values()))
    times = alternate(programs, max(1, arguments.rounds // 2), warm_up=0)
    print(
        f"64 words: uncached {times.median('uncached'):.2f} s, cached {times.median('cached'):.2f}"
        f" s, {times.ratio('uncached', 'cached'):.1f} × faster, identical words: {same}"
    )


if __name__ == "__main__":
    main()
