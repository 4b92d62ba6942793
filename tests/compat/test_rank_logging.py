"""Loggers that speak once: what arrives on standard error, in scripts and in several processes."""

import io
import logging
from contextlib import redirect_stderr

import pytest
from support.processes import run, script

import treadle
from treadle.utils import get_logger


def test_a_level_that_is_asked_for_shows_before_anything_is_set_up():
    done = script(
        """
from treadle.utils import get_logger
get_logger("quiet").info("hidden by logging's own default")
get_logger("quiet").warning("a warning")
import logging
logging.basicConfig(format="%(filename)s %(message)s")
get_logger("quiet").info("hidden by the root logger's level")
get_logger("app", "INFO").info("shown %s", "here")
get_logger("app.part", "debug").debug("once")
"""
    )
    assert done.stderr.splitlines() == ["a warning", "train.py shown here", "train.py once"]


def speaking():
    logger = get_logger("ranks", "INFO")
    with redirect_stderr(io.StringIO()) as heard:
        logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s", force=True)
        logger.info("early")  # before there is a process group
        accelerator = treadle.Accelerator(cpu=True)
        rank = accelerator.process_index
        logger.info("main")
        logger.info("all", main_process_only=False)
        logger.setLevel(logging.INFO if rank else logging.ERROR)
        logger.info("in order", in_order=True)  # rank zero's level hides it, and nobody hangs
        logger.setLevel(logging.INFO)
        logger.warning_once("once %d", 1)
        logger.warning_once("once %d", 1)
        logger.warning_once("once %d", 2)
    accelerator.wait_for_everyone()
    return heard.getvalue().splitlines()


def test_ranks():
    first, second = run(speaking, 2)
    assert first == [
        "INFO:ranks:[RANK 0] early",
        "INFO:ranks:[RANK 0] main",
        "INFO:ranks:[RANK 0] all",
        "WARNING:ranks:[RANK 0] once 1",
        "WARNING:ranks:[RANK 0] once 2",
    ]
    assert second == ["INFO:ranks:[RANK 1] all", "INFO:ranks:[RANK 1] in order"]


def test_it_is_a_standard_logger(caplog):
    logger = get_logger("standard")
    assert logger.propagate
    logger.setLevel("DEBUG")
    logger.debug("%s", "here")
    logger.log(logging.INFO, "there", in_order=True)
    logger.warning_once("mind")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_rank_logging.py", "test_it_is_a_standard_logger")
    }
    assert [record.getMessage() for record in caplog.records] == ["here", "there", "mind"]
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("standard", "loud")


class Adapter(logging.LoggerAdapter):
    """A logger adapter around another one: its records are those of its own caller."""

    def log(self, level, msg, *args, **kwargs):
        self.logger.log(level, msg, *args, stacklevel=3, **kwargs)


def test_a_record_names_its_caller(caplog):
    logger = get_logger("callers", "INFO")
    logger.info("as in Accelerate", stacklevel=2)
    Adapter(logger, {}).warning("adapter")
    assert [record.funcName for record in caplog.records] == ["test_a_record_names_its_caller"] * 2
