"""The whole kit, as the class that an adapter's test subclasses."""

from holdfast.testing.conformance.content import ContentPromises
from holdfast.testing.conformance.counting import CountingPromises
from holdfast.testing.conformance.crashing import CrashingPromises
from holdfast.testing.conformance.delivery import DeliveryPromises
from holdfast.testing.conformance.grouping import GroupingPromises
from holdfast.testing.conformance.hooks import Hooks
from holdfast.testing.conformance.lagging import LaggingPromises
from holdfast.testing.conformance.leasing import LeasingPromises
from holdfast.testing.conformance.membership import MembershipPromises
from holdfast.testing.conformance.ordering import OrderingPromises
from holdfast.testing.conformance.pausing import PausingPromises
from holdfast.testing.conformance.publishing import PublishingPromises
from holdfast.testing.conformance.replaying import ReplayingPromises
from holdfast.testing.conformance.settling import SettlingPromises
from holdfast.testing.conformance.staleness import StalenessPromises


class BrokerConformance(
    Hooks,
    PublishingPromises,
    ContentPromises,
    DeliveryPromises,
    GroupingPromises,
    LaggingPromises,
    SettlingPromises,
    LeasingPromises,
    CountingPromises,
    OrderingPromises,
    MembershipPromises,
    StalenessPromises,
    PausingPromises,
    ReplayingPromises,
    CrashingPromises,
):
    """Every promise of the broker port, to be kept by every adapter.

    ```python
    class TestMyBroker(BrokerConformance):
        url = "my://localhost:1234?session=1"
        session = 1.0

        @pytest.fixture
        def broker(self):
            return connect(self.url)
    ```
    A test of a capability that is not declared checks that it is refused; none is skipped.
    """
