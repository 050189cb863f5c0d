"""What ``serve`` writes to standard error keeps the form of its children's lines."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from scripts.serving.output import ServeOutput
output = ServeOutput("{form}")
output.say("starting")
output.relay("decode-0", '{{"message": "as it is"}}')
output.relay("decode-0", "{{not json")
output.relay("prefill-0", "Segmentation fault")
output.close()
"""


def written(form: str) -> list[str]:
    command = [sys.executable, "-c", CODE.format(form=form)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stderr.splitlines()


def test_lines_of_the_console_begin_with_the_name_of_their_process():
    assert written("console") == [
        "serve: starting",
        'decode-0 | {"message": "as it is"}',
        "decode-0 | {not json",
        "prefill-0 | Segmentation fault",
    ]


def test_json_lines_are_copied_and_other_lines_become_objects_of_their_process():
    lines = [json.loads(line) for line in written("json")]
    assert lines[1] == {"message": "as it is"}
    assert [(line.get("process"), line["message"]) for line in lines] == [
        ("serve", "starting"),
        (None, "as it is"),
        ("decode-0", "{not json"),
        ("prefill-0", "Segmentation fault"),
    ]
