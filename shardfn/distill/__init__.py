"""Learning from a teacher: divergences of a student's predictions and features, and steps with a teacher for a while.

Losses are pure functions of logits or features, and each is a `WeightedMean`, so any number of ranks and microbatches
has the gradient of the whole batch. The teacher is a frozen branch of the parameters.
"""

from ._divergence import Direction as Direction, logits as logits
from ._features import features as features
from ._staged import staged_step as staged_step
from ._swift import swift_loss as swift_loss
