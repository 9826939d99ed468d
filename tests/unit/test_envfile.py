"""Environment files, in systemd's format."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import envfile
from worker.errors import ConfigError

GENERATOR = "/usr/lib/systemd/user-environment-generators/30-systemd-environment-d-generator"
FILE = r"""
# a comment
; another \
A=plain
B = spaces around  	
C="double  quotes"
D='single # quotes'
E="with \"escapes\" \\ and \x"
F=a 'quote' later "stays"
G='one'"two" three
H=first \
   second
I="line one
line two"
J=back\slash\ \ 
K=
L=a#b;c
M='it'\''s'
N="joined \
up"
   O=indented
A2=é
"""
VARIABLES = {
    "A": "plain",
    "B": "spaces around",
    "C": "double  quotes",
    "D": "single # quotes",
    "E": 'with "escapes" \\ and \\x',
    "F": "a 'quote' later \"stays\"",
    "G": "onetwothree",
    "H": "first    second",
    "I": "line one\nline two",
    "J": "backslash  ",
    "K": "",
    "L": "a#b;c",
    "M": "it''s'",  # once a value has begun without quotes, quotes are themselves
    "N": "joined up",
    "O": "indented",
    "A2": "é",
}


def test_quotes_comments_and_continuations() -> None:
    """
    The format of systemd.exec(5), each rule once.
    """
    assert envfile.parse(FILE, "env") == VARIABLES


@pytest.mark.skipif(not os.path.exists(GENERATOR), reason="no systemd generator to compare with")
def test_systemd_reads_the_same(tmp_path: Path) -> None:
    """
    The parser behind EnvironmentFile= is also behind environment.d, and that can be asked from outside.
    """
    content = FILE.replace("; another \\\n", "")  # read differently before and after systemd 254
    folder = tmp_path / "environment.d"
    folder.mkdir()
    (folder / "test.conf").write_text(content)
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "HOME": str(tmp_path)}
    output = subprocess.run([GENERATOR], env=environment, capture_output=True, text=True, check=True).stdout
    theirs = dict(word.partition("=")[::2] for word in shlex.split(output))
    ours = VARIABLES | {"I": r"line one\nline two"}  # the generator escapes newlines on the way out
    del ours["K"]  # and leaves out what is empty
    assert {name: theirs.get(name) for name in ours} == ours


def test_the_last_one_wins_and_crlf_is_fine(tmp_path: Path) -> None:
    """
    Y7, for this file too.
    """
    file = tmp_path / "env"
    file.write_bytes(b"\xef\xbb\xbfA=1\r\nB='x'\r\nA=2\r\n")
    assert envfile.load(str(file)) == {"A": "2", "B": "x"}


def test_every_mistake_has_its_line_and_no_value_is_shown() -> None:
    """
    A message about a file of secrets holds none of them.
    """
    content = 'A=1\nhunter2\n\nexport B=hunter2\n1C=hunter2\nAGENT_X=hunter2\nLISTEN_FDS=3\nD="hunter2\n'
    with pytest.raises(ConfigError) as caught:
        envfile.parse(content, "/etc/env")
    lines = str(caught.value).split("\n")
    assert [line.split(":")[1] for line in lines] == ["2", "4", "5", "6", "7", "8"]
    assert lines[0] == "/etc/env:2:1: a line without '='; write NAME=VALUE, or start the line with '#'"
    assert "hunter2" not in str(caught.value)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")))
def test_any_value_survives_single_or_double_quotes(value: str) -> None:
    """
    Whatever a tool writes with the four escapes comes back as it was.
    """
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    assert envfile.parse(f'A="{escaped}"\nB=1\n', "env") == {"A": value, "B": "1"}


@given(st.text(st.sampled_from("A=\\'\"# \n;é"), max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    """
    Nothing but ConfigError comes out.
    """
    try:
        envfile.parse(text, "env")
    except ConfigError as exc:
        assert exc.problems
