"""`jaxspec generate` and `bench` with images: --image, parts of messages in lines, the directory of paths, refusals."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import jaxspec
from jaxspec.commands.bench import images
from tests import tiny_photo
from tests.commands.conftest import Outcome, Run

pytest.importorskip("PIL", reason="images need Pillow")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos")
    tiny_photo.write_target(path / "target")
    (path / "inside").mkdir()
    (path / "inside" / "photo.png").write_bytes(tiny_photo.png())
    (path / "outside.png").write_bytes(tiny_photo.png(1))
    (path / "inside" / "link.png").symlink_to(path / "outside.png")
    return path


@pytest.fixture
def run(invoke: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(photos)

    def run(*args: str, stdin: bytes | None = None) -> Outcome:
        sizes = "--max-new-tokens 6 --cache-length 256 --batch-size 1 --ignore-eos"
        of = ("generate", "--target", "target", *sizes.split())
        return invoke(*of, *args, stdin=stdin)

    return run


def line(*parts: dict[str, Any], **fields: Any) -> str:
    content = [*parts, {"type": "text", "text": "a b"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields})


def write(photos: Path, *lines: str) -> str:
    (photos / "inside" / "prompts.jsonl").write_text("\n".join(lines))
    return "inside/prompts.jsonl"


def test_an_image_stands_before_the_text(run: Run, photos: Path) -> None:
    outcome = run("a b", "--chat", "--image", "inside/photo.png", "--json", "-")
    assert outcome.code == 0, outcome.stderr
    (row,) = outcome.rows
    pair = jaxspec.load(str(photos / "target"))
    parts = [
        {"type": "image", "image": photos / "inside" / "photo.png"},
        {"type": "text", "text": "a b"},
    ]
    expected = pair.generate(
        [{"role": "user", "content": parts}], max_new_tokens=6, cache_length=256, ignore_eos=True
    )
    assert tuple(row["prompt_ids"]) == expected.prompt_ids
    assert tuple(row["token_ids"]) == expected.token_ids
    assert row["prompt"] == "<bos><turn>u<|image|>a b<turn>m"


def test_lines_have_paths_and_data_urls(run: Run, photos: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(tiny_photo.png()).decode()
    file = write(
        photos,
        line({"type": "image", "path": "photo.png"}),
        line({"type": "image_url", "image_url": {"url": url}}),
        line({"type": "image", "image": "photo.png"}, {"type": "image", "url": url}),
    )
    outcome = run("--prompts", file, "--chat", "--json", "-")
    assert outcome.code == 0, outcome.stderr
    first, second, both = outcome.rows
    assert first["token_ids"] == second["token_ids"]
    counts = [row["prompt_ids"].count(tiny_photo.IMAGE) for row in outcome.rows]
    assert counts == [63, 63, 126]
    assert both["prompt"].count("<|image|>") == 2


def test_paths_of_lines_stay_in_their_directory(run: Run, photos: Path) -> None:
    paths = ("../outside.png", str(photos / "outside.png"), "link.png")
    lines = [line({"type": "image", "path": path}) for path in paths]
    file = write(photos, *lines, line({"type": "image", "path": "photo.png"}))
    outcome = run("--prompts", file, "--chat", "--json", "-")
    assert outcome.code == 1
    *refused, good = outcome.rows
    for row in refused:
        assert "messages[0].content[0].path is " in row["error"]
        assert row["error"].endswith("which leaves inside")
    assert "error" not in good
    outcome = run("--prompts", file, "--chat", "--image-root", ".", "--json", "-")
    assert ["error" in row for row in outcome.rows] == [True, False, True, True]


def test_rows_of_other_images_are_other_rows(run: Run, photos: Path, tmp_path: Path) -> None:
    """The same command goes on with what is missing, unless an image has changed."""
    rows, image = str(tmp_path / "rows.jsonl"), photos / "changing.png"
    image.write_bytes(tiny_photo.png(5))
    args = ("a", "--chat", "--image", "changing.png", "--json", rows)
    assert run(*args).code == 0
    again = run(*args)
    assert "1 of 1 rows are in" in again.stderr
    image.write_bytes(tiny_photo.png(6))
    assert "belong to other prompts" in run(*args).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("a --image inside/photo.png", "--image needs --chat"),
        ("a --chat --image nowhere.png", "content[0].image cannot be read: "),
        ("a --chat --image target/manifest.json", "content[0].image is no image in PNG"),
        (
            "a --chat --image inside/photo.png --image-tokens 71",
            "--image-tokens is 71; it must be one of",
        ),
        (
            "a --chat --image inside/photo.png --text-only",
            "is an image, and the target reads text alone",
        ),
        ("--prompt-ids 5,6 --image inside/photo.png --chat", "token ids take no chat template"),
    ],
)
def test_what_cannot_be_used_is_refused(run: Run, args: str, message: str) -> None:
    outcome = run(*args.split())
    assert outcome.code != 0
    assert message in outcome.stderr.replace("\n", " ")


def test_messages_have_images_of_their_own(run: Run, photos: Path) -> None:
    file = write(photos, line({"type": "image", "path": "photo.png"}))
    outcome = run("--prompts", file, "--chat", "--image", "inside/photo.png")
    assert "messages have image parts" in outcome.stderr


def test_a_dry_run_counts_the_vision_part(run: Run) -> None:
    both = [run("a", "--dry-run", *more, "--json", "-").stdout for more in ((), ("--text-only",))]
    counted = [json.loads(out.splitlines()[-1])["dry_run"]["bytes_a_device"] for out in both]
    assert counted[0]["weights"] > counted[1]["weights"]
    assert counted[0]["activations"] > counted[1]["activations"]


def bench_images(run: Run, *args: str) -> Outcome:
    common = ("--drafter", "none", "--dtype", "float32", "--images", "--repeats", "1")
    return run("bench", *common, *args)


def test_images_are_measured(invoke: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size has its program and its floor, and the first token waits for the image."""
    monkeypatch.setattr(images, "IMAGE_TOKENS", (70, 140))
    target = ("--target", str(photos / "target"))
    done = bench_images(invoke, *target, "--json", "-")
    assert done.code == 0
    report = json.loads(done.stdout)
    for result, tokens in zip(report["images"], (70, 140), strict=True):
        assert (result["tokens"], result["patches"]) == (tokens, 9 * tokens)
        assert result["image_ms"]["median"] > 0 < result["floor_ms"]
        assert result["temporary_bytes"] > 0 < result["flops"]
    first = report["first_token"]
    assert (first["image_tokens"], first["prompt_tokens"]) == (70, 64 + 70 + 2)
    assert first["text_ms"]["median"] > 0 < first["image_ms"]["median"]
    shown = bench_images(invoke, *target, "--prompt-length", "10").stdout
    assert "first token of a prompt of 82 tokens" in " ".join(shown.split())
    planned = bench_images(invoke, *target, "--dry-run")
    assert "activations" in planned.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "has no vision part"),
        (("--batch-size", "1"), "leave --batch-size"),
        (("--trace", "generated"), "leave --plot and --trace out"),
    ],
)
def test_images_that_are_not_measured(invoke: Run, args: tuple[str, ...], message: str) -> None:
    done = bench_images(invoke, *args)
    assert done.code == 2
    assert message in " ".join(done.stderr.split())
