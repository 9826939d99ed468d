"""What a machine says of its worker, as it is read here: it may say anything."""

from worker.supervise import remote

UNIT = "ActiveState=failed\nExecMainStatus=78\n"


def test_a_checkpoint_is_there_when_the_machine_says_so() -> None:
    """
    Whatever else it says; one that is not there yet is not copied.
    """
    assert remote.read(f"{UNIT}Checkpoint=there\n").checkpoint
    assert not remote.read(UNIT).checkpoint
    assert not remote.read("").checkpoint
