"""Batch n as a pure function of (seed, n), the same under any number of ranks."""

from ._mixture import Batches as Batches, TokenSource as TokenSource
from ._collate import IGNORED as IGNORED, first_fit as first_fit, pack as pack, pad as pad
from ._collate import LEARN as LEARN, encode_answers as encode_answers, encode_chat as encode_chat
from ._sources import default_corpus as default_corpus
from ._mixture import BatchRamp as BatchRamp, Cursor as Cursor
from ._mixture import ExampleBatches as ExampleBatches, Examples as Examples
from ._images import expand_images as expand_images, pad_images as pad_images
from ._audio import log_mel as log_mel, read_wav as read_wav
from ._images import read_image as read_image, read_image_url as read_image_url
from ._sources import JSONLines as JSONLines
from ._mixture import Mixture as Mixture
from ._own_rows import OwnExamples as OwnExamples
from ._own_rows import shard_rows as shard_rows
from ._permute import permute as permute
from ._batch_stream import prefetch as prefetch
from ._batch_stream import Stream as Stream
from ._tokenizers import BPETokenizer as BPETokenizer, ByteTokenizer as ByteTokenizer, Tokenizer as Tokenizer
from ._sources import TokenFile as TokenFile, encode_files as encode_files
