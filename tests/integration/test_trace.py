"""The page that replays a decoding: its frames agree with the decoding, and a real browser steps and plays it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "convert"))
from made_up import make_checkpoint, model_shape

from refusion_train.cli import run
from refusion_train.convert.export import export_checkpoint

NEW_TOKENS, SLOT = 24, 4
_FINAL = {"accepted", "committed", "corrected", "redrawn", "planned"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Any) -> Path:
    root = tmp_path_factory.mktemp("traced")
    make_checkpoint(root, tiny_dataset.train, model_shape())
    return export_checkpoint(str(root), str(root / "hf"), dtype="float32")


def _generate(folder: Path, page: Path, *words: str, prompt: str = "the cat") -> int:
    return run(["generate", str(folder), "--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS), "--slot-size",
                str(SLOT), "--trace", str(page), *words])  # fmt: skip


def _data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize(
    "words",
    [[], ["--slot-threshold", "0.02", "--token-threshold", "0.01"], ["--correction", "redraft"],
     ["--decoding", "left_to_right"], ["--temperature", "1", "--seed", "3", "--num-blocks", "2"]],
    ids=["greedy", "several slots", "redraft", "left to right", "sampled"],
)  # fmt: skip
def test_frames_are_the_decoding(words: list[str], folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert _generate(folder, tmp_path / "page.html", *words) == 0
    forwards = int(re.search(r"tokens in (\d+) forwards", capsys.readouterr().err)[1])  # type: ignore[index]
    frames = _data(tmp_path / "page.html")["frames"]
    assert [frame["forward"] for frame in frames] == list(range(1, forwards + 1))
    kept_before: dict[int, str] = {}
    for frame in frames:
        assert len(frame["cells"]) == NEW_TOKENS
        kept = {i: text for i, (text, state, _) in enumerate(frame["cells"]) if state in ("committed", "accepted")}
        if frame["cache"] or "left_to_right" in words:
            assert all(frame["cells"][i][0] == text for i, text in kept_before.items()), "a kept token changed"
            kept_before = {i: text for i, text in kept.items() if i // SLOT in frame["cache"] or not frame["cache"]}
        assert len(set(frame["cache"])) == len(frame["cache"])
        for slot in frame["cache"]:
            states = {state for _, state, _ in frame["cells"][slot * SLOT : (slot + 1) * SLOT]}
            assert states <= {"committed", "cut"}
        assert all(0 <= sure <= 1 for _, _, sure in frame["cells"])
    assert all(state in (*_FINAL, "cut") for _, state, _ in frames[-1]["cells"])
    whats = {state for frame in frames for _, state, _ in frame["cells"]}
    if "left_to_right" not in words:
        assert {"planned", "draft", "committed", "redrawn" if "redraft" in words else "corrected"} <= whats


def test_a_page_that_exists_is_not_touched(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "page.html").write_text("mine")
    assert _generate(folder, tmp_path / "page.html") == 2
    assert _generate(folder, tmp_path / "nowhere" / "page.html") == 2
    assert (tmp_path / "page.html").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    assert "exists already" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[str]:
    """Address of the first page of a headless Chromium, for its own protocol."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    profile = tmp_path / "profile"
    process = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("Chromium ended before it could be spoken to")
    finally:
        process.kill()
        process.wait(30)


async def _drive(address: str, page: Path, scripts: list[str]) -> list[Any]:
    """Open a page in a tab of its own and evaluate expressions in it, each awaited if it is a promise."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=1 << 26) as socket:
        number = 0

        async def ask(method: str, **values: Any) -> Any:
            nonlocal number
            number += 1
            await socket.send_json({"id": number, "method": method, **values})
            while True:
                answer = await asyncio.wait_for(socket.receive_json(), 60)
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]

        made = await ask("Target.createTarget", params={"url": page.as_uri()})
        attached = await ask("Target.attachToTarget", params={"targetId": made["targetId"], "flatten": True})

        async def evaluate(script: str) -> Any:
            answer = await ask(
                "Runtime.evaluate", sessionId=attached["sessionId"],
                params={"expression": script, "awaitPromise": True, "returnByValue": True},
            )  # fmt: skip
            assert "exceptionDetails" not in answer, answer
            return answer["result"].get("value")

        for _ in range(200):  # a new tab is an empty page at first
            if await evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
                break
            await asyncio.sleep(0.1)
        return [await evaluate(script) for script in scripts]


@pytest.mark.slow
def test_a_browser_steps_and_plays_it(folder: Path, browser: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hostile = "</script><b id=evil>&amp; the cat"
    assert _generate(folder, page, prompt=hostile) == 0
    frames = _data(page)["frames"]
    names = "[...slot.querySelectorAll('.cell')].map(cell => cell.className)"
    shown = f"[...document.querySelectorAll('#slots .slot')].map(slot => {names})"
    says = "document.getElementById('says').textContent"

    def classes(frame: dict[str, Any]) -> list[list[str]]:
        cells = [f"cell {state}" for _, state, _ in frame["cells"]]
        slots = [cells[i : i + SLOT] for i in range(0, len(cells), SLOT)]
        return [slot for slot in slots if set(slot) != {"cell cut"}]

    wait = "new Promise(done => setTimeout(done, {}))"
    at_end, first, second, back, key, _, playing, paused, squares, evil, prompt = asyncio.run(
        _drive(
            browser, page,
            [
                shown,
                f"document.getElementById('first').click(); {shown}",
                f"document.getElementById('next').click(); {shown}",
                f"document.getElementById('back').click(); {says}",
                f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowRight'}})); {says}",
                f"document.getElementById('play').click(); {wait.format(1800)}",
                f"document.getElementById('play').click(); {says}",
                f"{wait.format(1000)}.then(() => {says})",
                "document.querySelectorAll('#picture rect').length",
                "document.getElementById('evil')",
                "document.querySelector('pre').textContent",
            ],
        )
    )  # fmt: skip
    assert at_end == classes(frames[-1])
    assert first == classes(frames[0]) and second == classes(frames[1])
    assert back.startswith("Forward 1:") and key.startswith("Forward 2:")
    assert playing.startswith("Forward 4:") and paused == playing
    assert squares == sum(state != "cut" for frame in frames for _, state, _ in frame["cells"])
    assert evil is None and prompt == hostile
