"""The rules of ``--auto-switch``, over random orders of requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.server.switching.switch_queue import QueueFull, SwitchQueue, WaitingRequest

MODELS = ("a", "b", "c")
MIN_STAY = 10.0

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*MODELS, None, "leave", "order"]),
        st.sampled_from([0.0, 0.1, 3.0, 11.0]),  # seconds until the next event
    ),
    min_size=1,
    max_size=80,
)


class Driver:
    """What the server does with a queue, on a clock of its own."""

    def __init__(self, max_waiting: int, switch_s: float) -> None:
        self.queue = SwitchQueue("a", min_stay_s=MIN_STAY, max_waiting=max_waiting)
        self.switch_s = switch_s
        self.now = 0.0
        self.ends_s: float | None = None
        self.target = ""
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.waiting: dict[WaitingRequest, int] = {}
        """Requests that wait, with the number of switches that had begun when they came."""
        self.longest_wait = 0

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            if self.ends_s is not None:
                if self.ends_s > end:
                    break
                self.now, self.ends_s = self.ends_s, None
                self.ended.append(self.now)
                for request in self.queue.end(self.target, self.now):
                    assert request.alias in (None, self.target)
                    waited = len(self.begun) - self.waiting.pop(request)
                    self.longest_wait = max(self.longest_wait, waited)
            wait_s = self.queue.next_switch_s(self.now)
            if wait_s is None or self.now + wait_s > end:
                break
            self.now += wait_s
            self.target = self.queue.begin()
            self.begun.append(self.now)
            self.ends_s = self.now + self.switch_s
        self.now = end

    def order_active(self) -> None:
        """An administrator's order for the active model, which loads nothing."""
        if self.ends_s is None:
            self.queue.begin(self.queue.active)
            assert not self.queue.end(self.queue.active, self.now, has_loaded=False)

    def arrive(self, alias: str | None) -> bool:
        request = WaitingRequest(alias)
        if self.queue.arrive(request):
            return True
        self.waiting[request] = len(self.begun)
        return False


@given(EVENTS, st.integers(1, 20), st.sampled_from([0.0, 1.0, 25.0]))
@settings(max_examples=300, deadline=None)
def test_no_model_starves_no_stay_is_cut_and_no_queue_grows(events, max_waiting, switch_s):
    driver = Driver(max_waiting, switch_s)
    for event, seconds in events:
        if event == "order":
            driver.order_active()
        elif event == "leave":
            for request in list(driver.waiting)[:1]:
                driver.queue.leave(request)
                del driver.waiting[request]
        else:
            try:
                served = driver.arrive(event)
            except QueueFull:
                assert len(driver.queue) == max_waiting
            else:
                expected = not driver.queue.is_switching and event in (None, driver.queue.active)
                assert served == expected
        assert len(driver.queue) == len(driver.waiting) <= max_waiting
        driver.advance(seconds)
    # a stay of each model, and the switches between them, serve all that wait
    driver.advance((MIN_STAY + switch_s) * (len(MODELS) + 1))
    assert not driver.waiting
    assert driver.longest_wait <= len(MODELS)
    for begun, ended in zip(driver.begun[1:], driver.ended, strict=False):
        assert begun - ended >= MIN_STAY - 1e-9


def test_orders_that_load_nothing_delay_no_switch():
    driver = Driver(10, 1.0)
    driver.queue.end("a", 0.0)
    driver.arrive("b")
    for _ in range(100):
        driver.advance(MIN_STAY / 4)
        driver.order_active()
    assert driver.begun == [MIN_STAY]


def test_the_request_that_waits_longest_chooses_the_model():
    driver = Driver(10, 1.0)
    driver.queue.end("a", 0.0)
    for alias in ("b", "c", "b"):
        assert not driver.arrive(alias)
    driver.advance(MIN_STAY)
    assert driver.target == "b"
    driver.advance(1.0 + MIN_STAY)
    assert driver.target == "c"


def test_one_client_fills_half_of_the_queue_at_most():
    queue = SwitchQueue("a", min_stay_s=30.0, max_waiting=5)
    flood = [WaitingRequest("b", client="flood") for _ in range(3)]
    for request in flood[:2]:
        assert not queue.arrive(request)
    with pytest.raises(QueueFull):
        queue.arrive(flood[2])
    assert not queue.arrive(WaitingRequest("b", client="other"))
    queue.leave(flood[0])
    assert not queue.arrive(flood[2])


def test_a_request_that_waits_again_keeps_its_place():
    queue = SwitchQueue("a", min_stay_s=1.0, max_waiting=9)
    first, second = WaitingRequest("b"), WaitingRequest("c")
    queue.arrive(first)
    queue.arrive(second)
    queue.leave(first)
    assert not queue.arrive(first)
    assert queue.begin() == "b"


def test_parked_requests_bring_their_model_back():
    queue = SwitchQueue("a", min_stay_s=1.0, max_waiting=1)
    queue.arrive(WaitingRequest("b"))
    queue.end(queue.begin(), 0.0, parked="a")
    assert queue.next_switch_s(0.5) == 0.5
    queue.arrive(WaitingRequest("c"))  # later than the parked ones, which do not fill the queue
    assert queue.begin() == "a"
    queue.end("a", 2.0)
    assert queue.begin() == "c"
    queue.end("c", 4.0)
    assert queue.next_switch_s(9.0) is None


def test_a_model_that_cannot_be_loaded_is_not_tried_again_at_once():
    queue = SwitchQueue("a", min_stay_s=1.0, max_waiting=9)
    failing, other = WaitingRequest("b"), WaitingRequest("c")
    queue.arrive(failing)
    queue.arrive(other)
    assert queue.begin() == "b"
    assert queue.end("a", 5.0) == []
    assert queue.refuse("b", 5.0) == [failing]
    assert queue.next_switch_s(5.0) == 1.0
    assert queue.begin() == "c"


def test_a_model_that_failed_a_thousand_times_is_tried_in_an_hour():
    queue = SwitchQueue("a", min_stay_s=30.0, max_waiting=9)
    for number in range(1100):
        queue.refuse("b", number, "no weights")
    assert queue.failure_of("b", 1099).not_before_s == 1099 + 3600


def test_an_engine_that_cannot_switch_now_is_no_failure_of_the_model():
    queue, now = SwitchQueue("b", min_stay_s=10.0, max_waiting=9), 0.0
    queue.begin("a")
    queue.end("a", now, parked="b")
    for _ in range(5):
        wait_s = queue.next_switch_s(now)
        assert wait_s == 10.0
        now += wait_s
        queue.begin(now_s=now)
        queue.end("a", now)
        assert queue.delay("b", now) == []
    queue.refuse("b", now, "no weights")
    assert queue.failure_of("b", now).num_failures == 1


def test_no_switch_begins_without_a_request_for_it():
    queue = SwitchQueue("a", min_stay_s=1.0, max_waiting=9)
    assert queue.arrive(WaitingRequest("a"))
    assert queue.next_switch_s(0.0) is None
    with pytest.raises(ValueError, match="no request"):
        queue.begin()
    assert queue.retry_after_s(0.0) == 1


def test_a_parked_model_that_fails_is_tried_more_and_more_rarely():
    queue, now, tried = SwitchQueue("b", min_stay_s=10.0, max_waiting=9), 0.0, []
    queue.begin("a")
    queue.end("a", now, parked="b")
    while now < 4000:
        wait_s = queue.next_switch_s(now)
        now += wait_s
        assert queue.begin(now_s=now) == "b"
        tried.append(now)
        queue.end("a", now)
        assert queue.refuse("b", now) == []
    assert [b - a for a, b in itertools.pairwise(tried)][:4] == [20, 40, 80, 160]
    assert queue.failure_of("b", now) is None, "the model was not at fault: requests may wait"
    queue.arrive(WaitingRequest("c"))
    assert queue.next_switch_s(now) <= 10, "others do not wait for it"


def test_requests_for_a_failing_model_are_refused_for_longer_each_time_until_it_loads():
    queue, now, waits = SwitchQueue("a", min_stay_s=10.0, max_waiting=9), 0.0, []
    for _ in range(10):
        assert queue.failure_of("b", now) is None
        queue.arrive(WaitingRequest("b"))
        queue.begin()
        queue.end("a", now)
        queue.refuse("b", now, "no weights")
        failure = queue.failure_of("b", now)
        assert failure.reason == "no weights"
        waits.append(failure.not_before_s - now)
        assert queue.failure_of("c", now) is queue.failure_of(None, now) is None
        now = failure.not_before_s
    assert waits == [20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]
    queue.begin("b")
    queue.end("b", now)
    assert queue.failure_of("b", now - 1) is None
    queue.refuse("b", now, "it ended the core", ended_core=True)
    assert queue.failure_of("b", now).not_before_s == now + 3600
