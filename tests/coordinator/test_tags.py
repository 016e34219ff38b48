"""Tags of devices: who sets them, and what they select."""

import pytest

from sparrow.coordinator.errors import BadContent, NotAllowed
from sparrow.coordinator.fleet.issuing import create as create_token
from sparrow.coordinator.reports.device_list import DeviceQuery
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.protocol.events import EventKind
from sparrow.protocol.messages import ChangeDevice, CreateToken, Doing, Enrol

TAGS = {"board": ["orin", "pi5"], "site": ["lab", "field"]}


@pytest.fixture
def begin(open_coordinator):
    """Makes a coordinator with a federation that lists tags."""

    def make(**settings):
        coordinator = open_coordinator()
        coordinator.create(**{"tags": TAGS, "cohort": 10, "min_devices": 2, "rounds": 3, **settings})
        return coordinator

    return make


def enrol(coordinator, name, *, token_id=None, **tags):
    key = name.ljust(32, "-")
    request = Enrol(name=name, enrolment_key=key, tags=tags or None)
    return coordinator.devices.enrol("f", request, token_id).device_id


def listed(coordinator, where=""):
    return {each.name: each for each in coordinator.device_lists.list("f", DeviceQuery(where=where))[0]}


def make_token(coordinator, where):
    with coordinator.store.writing() as db:
        return create_token(db, CreateToken(kind="enrolment", federation="f", where=where), coordinator.clock()).id


def test_an_administrators_tags_replace_a_devices_own(begin):
    coordinator = begin()
    device = enrol(coordinator, "a", board="orin", site="lab")
    coordinator.devices.change(device, ChangeDevice(set_tags={"site": "field"}))
    coordinator.devices.change(device, ChangeDevice(tags={"board": "pi5", "site": "lab"}))
    found = listed(coordinator)["a"]
    assert found.tags == {"board": "pi5", "site": "field"}
    assert found.set_tags == ("site",)
    coordinator.devices.change(device, ChangeDevice(set_tags={"site": None}))
    assert listed(coordinator)["a"].tags == {"board": "pi5", "site": "lab"}
    tagged = [each for each in coordinator.timeline.look("f").events if each.kind is EventKind.tagged]
    assert [each.device for each in tagged] == ["a", "a"]


def test_a_restart_without_tags_keeps_them(begin):
    coordinator = begin()
    enrol(coordinator, "a", board="orin")
    enrol(coordinator, "a")
    assert listed(coordinator)["a"].tags == {"board": "orin"}


def test_tags_that_the_federation_does_not_list_are_refused(begin):
    coordinator = begin()
    for wrong in ({"board": "nano"}, {"power": "mains"}):
        with pytest.raises(BadContent, match="lists"):
            enrol(coordinator, "a", **wrong)
    assert not listed(coordinator)
    device = enrol(coordinator, "a")
    for change in ({"tags": {"board": "nano"}}, {"set_tags": {"power": "mains"}}):
        with pytest.raises(BadContent):
            coordinator.devices.change(device, ChangeDevice(**change))


def test_lists_select_by_tags_as_selections_do(begin):
    coordinator = begin()
    enrol(coordinator, "a", board="orin", site="lab")
    enrol(coordinator, "b", board="pi5", site="field")
    enrol(coordinator, "c")
    for where, names in {
        "board=orin": ["a"],
        "board!=orin": ["b", "c"],
        "board in (orin, pi5)": ["a", "b"],
        "site=field and board!=orin": ["b"],
    }.items():
        assert list(listed(coordinator, where)) == names
    with pytest.raises(BadContent, match="where"):
        listed(coordinator, "board=nano")


def test_only_selected_devices_train(begin):
    coordinator = begin(cohort_where="board=orin", min_devices=3)
    for name, tags in {"a": {"board": "orin"}, "b": {"board": "pi5"}, "c": {}}.items():
        enrol(coordinator, name, **tags)
    coordinator.rounds.advance()
    assert coordinator.record(1).cohort == ("a",)
    assert {name: each.doing for name, each in listed(coordinator).items()} == {
        "a": Doing.training,
        "b": Doing.not_selected,
        "c": Doing.not_selected,
    }


def test_a_selection_without_devices_waits_and_says_for_whom(begin):
    coordinator = begin(cohort_where="board=orin")
    device = enrol(coordinator, "a", board="pi5")
    enrol(coordinator, "b")
    coordinator.rounds.advance()
    coordinator.rounds.advance()
    assert coordinator.info().status == "running"
    assert "board=orin" in coordinator.info().waiting_for
    coordinator.devices.change(device, ChangeDevice(set_tags={"board": "orin"}))
    coordinator.rounds.advance()
    assert coordinator.record(1).cohort == ("a",)


def test_a_selection_changes_between_rounds_and_stays_within_the_listed_tags(begin):
    coordinator = begin()
    coordinator.change(cohort_where="site=lab")
    with pytest.raises(BadContent, match="cohort_where"):
        coordinator.change(cohort_where="power=mains")
    with pytest.raises(BadContent, match="cohort_where"):
        coordinator.change(tags={"board": ["orin"]})
    coordinator.change(tags="site=lab,field,roof")
    assert coordinator.info().settings.tags == {"site": ("lab", "field", "roof")}


def test_a_secure_sum_waits_for_enough_selected_devices(begin):
    coordinator = begin(method="fedavg", secure=True, cohort_where="site=lab", min_devices=3, cohort=5)
    for name in ("a", "b"):
        enrol(coordinator, name, site="lab")
    for name in ("c", "d", "e"):
        enrol(coordinator, name, site="field")
    coordinator.rounds.advance()
    coordinator.rounds.advance()
    assert coordinator.info().round == 0
    assert "3 devices" in coordinator.info().waiting_for


def test_a_token_gives_its_tags_and_refuses_other_devices(begin):
    coordinator = begin()
    lab = make_token(coordinator, "site=lab and board!=pi5")
    device = enrol(coordinator, "a", token_id=lab, board="orin")
    assert listed(coordinator)["a"].tags == {"board": "orin", "site": "lab"}
    coordinator.devices.change(device, ChangeDevice(tags={"site": "field"}))
    assert listed(coordinator)["a"].tags == {"site": "lab"}
    for wrong in ({"site": "field"}, {"board": "pi5"}):
        with pytest.raises(NotAllowed, match="site=lab"):
            enrol(coordinator, "b", token_id=lab, **wrong)
    assert list(listed(coordinator)) == ["a"]
    with pytest.raises(BadContent, match="where"):
        make_token(coordinator, "board=nano")


def test_metrics_count_only_the_tags_that_the_operator_lists(begin):
    coordinator = begin()
    for name in ("a", "b"):
        enrol(coordinator, name, board="orin", site="lab")

    def series(*tags):
        metrics = Metrics()
        metrics.observe_records(coordinator.store, coordinator.clock, tags)
        lines = metrics.text(coordinator.store, ready=True).decode().splitlines()
        return [line for line in lines if line.startswith("sparrow_tagged_devices{")]

    assert series() == []
    assert series("board") == ['sparrow_tagged_devices{federation="f",tag="board",value="orin"} 2.0']


def test_a_removed_device_leaves_no_tags(begin):
    coordinator = begin()
    device = enrol(coordinator, "a", board="orin")
    coordinator.devices.remove(device)
    history = coordinator.device_lists.history(device, 1)
    assert history.device.tags == {}
