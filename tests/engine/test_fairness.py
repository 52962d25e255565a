"""Tenants share by weight; nobody saves up and nobody is remembered for ever."""

from tailrace.engine.fairness import FORGET_ABOVE, FairOrder


def served(order: FairOrder, requests: list[tuple[str, int]]) -> list[str]:
    tags = [(order.tag(tenant, tokens), at, tenant) for at, (tenant, tokens) in enumerate(requests)]
    return [tenant for _, _, tenant in sorted(tags)]


def test_one_tenant_is_served_first_come_first_served() -> None:
    order = FairOrder({})
    tags = [order.tag("a", tokens) for tokens in (100, 1, 50, 7)]
    assert tags == sorted(tags)


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    assert served(FairOrder({}), [("flood", 10)] * 50 + [("light", 10)]).index("light") <= 2


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens() -> None:
    first = served(FairOrder({"a": 2.0}), [("a", 10)] * 40 + [("b", 10)] * 40)[:30]
    assert 18 <= first.count("a") <= 22


def test_an_absent_tenant_saves_nothing_up() -> None:
    order = FairOrder({})
    for _ in range(100):
        order.admitted(order.tag("busy", 10))
    back = [order.tag("back", 10) for _ in range(20)]
    assert back[0] <= order.tag("busy", 10) <= back[2]


def test_unused_tokens_are_given_back() -> None:
    order = FairOrder({})
    order.tag("a", 1000)
    order.give_back("a", 990)
    assert order.tag("a", 10) == 10.0


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    order = FairOrder({})
    for n in range(5 * FORGET_ABOVE):
        order.admitted(order.tag(f"t{n}", 10))
        order.admitted(order.tag("clock", 100))
    assert len(order._ends) <= FORGET_ABOVE + 1
