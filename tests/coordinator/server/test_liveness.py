from unicron_lightning.coordinator.server.timers import Liveness
from unicron_lightning.detection.silence import SilenceLimits, outdated


def test_limits_are_renewed_when_the_number_of_agents_has_doubled() -> None:
    limits = SilenceLimits(beat=0.5, least=1.2, most=4.5)
    liveness = Liveness(limits, lambda _: None, lambda: None)
    assert not any(liveness.beat(conn) for conn in range(1_001))
    assert not liveness.beat(0), "a thousand agents have the beat of one"
    renewed = {conn for conn in range(1_001, 10_000) if liveness.beat(conn)}
    assert not renewed, "a first beat has the limits of its time"
    assert liveness.beat(0) and not liveness.beat(0)
    assert liveness.beat(1_500) and not liveness.beat(9_999)
    for conn in range(1_000, 10_000):
        liveness.forget(conn)
    assert liveness.beat(0) and not liveness.beat(0), "fewer agents, too"


def test_outdated_limits() -> None:
    def limits(beat: float) -> SilenceLimits:
        return SilenceLimits(beat=beat, least=2 * beat, most=3 * beat)

    assert not outdated(limits(1.0), limits(1.9)) and not outdated(limits(1.9), limits(1.0))
    assert outdated(limits(1.0), limits(2.0)) and outdated(limits(2.0), limits(1.0))
