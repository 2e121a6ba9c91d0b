"""The table of capabilities, compared with the contract."""

import re

import pytest

from cuaenv.capabilities import CAPABILITIES
from cuaenv.v1 import env_pb2

SERVICE = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"]
#: Methods of the first release, which every daemon has.
FIRST = {
    "Reset",
    "Step",
    "StreamSteps",
    "Observe",
    "Evaluate",
    "Fork",
    "Close",
    "KeepAlive",
    "StreamFrames",
    "ListPools",
    "WatchPools",
    "ListEpisodes",
    "ListTasks",
    "ReadGuestFile",
    "WriteGuestFile",
    "RunGuestCommand",
}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_names_what_the_contract_has(name: str) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
    for element in CAPABILITIES[name].elements:
        message, _, field = element.partition(".")
        known = env_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name if field else SERVICE.methods_by_name
        assert (field or message) in known


def test_every_method_since_the_first_release_belongs_to_one_capability() -> None:
    methods = [each for capability in CAPABILITIES.values() for each in capability.elements if "." not in each]
    assert sorted(methods) == sorted(set(SERVICE.methods_by_name) - FIRST)
