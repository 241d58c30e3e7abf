"""Messages between ranks: channels over shared memory or a process group, control messages, failures."""

from ._calls import (
    Calls as Calls,
    FlightEntry as FlightEntry,
    FlightRecorder as FlightRecorder,
    flight_recorder_of as flight_recorder_of,
)
from ._channel import (
    Channel as Channel,
)
from ._channel import (
    Channels as Channels,
)
from ._control import (
    Agreed as Agreed,
    Constant as Constant,
    Control as Control,
    text_hash as text_hash,
)
from ._epoch import (
    absent_from as absent_from,
)
from ._failure import (
    TransportError as TransportError,
    close as close,
)
from ._channel import (
    forget_loss_channels as forget_loss_channels,
    loss_channel as loss_channel,
    set_loss_channels as set_loss_channels,
)
from ._rounds import (
    Notice as Notice,
    notice_of as notice_of,
)
from ._packing import (
    Cuts as Cuts,
    EvenPacking as EvenPacking,
    Packing as Packing,
    Stretch as Stretch,
    dealt as dealt,
)
from ._epoch import (
    naming_the_wait as naming_the_wait,
)
from ._rounds import (
    Rounds as Rounds,
)
from ._sharing import (
    chosen_channel as chosen_channel,
)
from ._transfers import (
    is_sole_owner as is_sole_owner,
    may_be_added_to as may_be_added_to,
)
from ._transfers import (
    Traffic as Traffic,
    count_traffic as count_traffic,
    counting_nothing as counting_nothing,
    record as record,
)
from ._transfers import (
    ordered_sum as ordered_sum,
)
