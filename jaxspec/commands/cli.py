"""The command line. Each command is a folder of its own.

JAX is imported only once a command surely needs it, so that help and mistakes cost no start-up.
Exit codes: 0, all is done; 1, some prompts were refused and the rest is done; 2, a mistake, one
message, nothing done; 130, Ctrl-C; 143, SIGTERM; 141, the reader of standard output left.
`jaxspec.__main__` runs this.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import jaxspec
from jaxspec.commands.bench.command import bench_command
from jaxspec.commands.check.command import check_command
from jaxspec.commands.convert import convert_command
from jaxspec.commands.evaluate.command import eval_command
from jaxspec.commands.generate.command import generate
from jaxspec.commands.serve.command import serve
from jaxspec.commands.train_drafter.command import train_drafter_command

OTHER_NAMES = {
    "--target target": "--model --model-path --model-id --pretrained --checkpoint",
    "source": "--model --model-path --model-id --pretrained --checkpoint",
    "target": "--target",
    "drafter": "--drafter",
    "--drafter drafter": "--draft-model --speculative-model --assistant-model --spec-model",
    "--num-draft-tokens": "--num-speculative-tokens --num-assistant-tokens --draft-max --spec-tokens",
    "--max-new-tokens --new-tokens": "--max-tokens --max-completion-tokens --max-length --n-predict",
    "--cache-length": "--max-model-len --ctx-size --context-size --max-seq-len",
    "--slots --batch-size": "--max-num-seqs --parallel --max-batch-size",
    "--max-prefill-tokens": "--max-num-batched-tokens --chunked-prefill-size",
    "--mesh": "--tensor-parallel-size --tp --tp-size --data-parallel-size --dp",
    "--quantize": "--quantization --load-in-8bit --load-in-4bit",
    "--kv-dtype": "--kv-cache-dtype --cache-type-k --cache-type-v",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--num-samples": "--n --num-return-sequences --best-of",
    "--prompts": "--prompt-file --input --input-file",
    "prompts": "--prompt",
    "--json": "--output --output-file --out",
    "--stop-id": "--stop-token-ids --eos-token-id",
    "--json-schema": "--guided-json --schema",
    "--regex": "--guided-regex",
    "--lark": "--guided-grammar --grammar --grammar-file",
    "--prefix-gib": "--enable-prefix-caching --prefix-cache",
    "--token": "--hf-token --auth-token",
}
"""Options of other programs and commands, by what they are here: an option, or else an argument."""


class Command(TyperCommand):
    """A command that knows the names of its options in other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. An option that is not known is answered with ours of its meaning."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer brings its own copy of click, or uses click, so that the class has two homes.
            wrong = getattr(error, "option_name", None)
            own = {name for p in self.params for name in p.opts}
            for ours, theirs in OTHER_NAMES.items():
                known = [name for name in ours.split() if name in own]
                if known and wrong in theirs.split() and hasattr(error, "possibilities"):
                    name = known[0]
                    is_option = name.startswith("--")
                    argument = "SRC" if name == "source" else name.upper()
                    shown = name if is_option else f"the argument {argument}"
                    error.possibilities = [shown]  # pyright: ignore[reportAttributeAccessIssue]
            raise


app = typer.Typer(
    name="jaxspec",
    help="Speculative decoding of Gemma 4 and Qwen3 in JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # tracebacks are for bug reports: plain, and without locals
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"jaxspec {jaxspec.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


app.command("generate", cls=Command)(generate)
app.command("check", cls=Command)(check_command)
app.command("bench", cls=Command)(bench_command)
app.command("eval", cls=Command)(eval_command)
app.command("convert", cls=Command)(convert_command)
app.command("train-drafter", cls=Command)(train_drafter_command)
app.command("serve", cls=Command)(serve)
