"""From samples to batches on the device. The life of a sample, from COCO JSON to a batch on the
device:

1. **Annotations** (`colab_utils.data.coco`): `read_coco` reads the JSON once. Its numbers go into
   flat arrays; an annotation stays JSON text until its image is asked for.
2. **Masks** (`colab_utils.data.masks`): `encode_segmentation` turns each polygon into RLE,
   `pack_masks` the RLE into packed masks: each cropped to its own box, one bit a pixel.
3. **Image** (`colab_utils.shards.stored_images`): `store_image` keeps the original bytes, or
   shrinks what is larger than training needs, once. `make_record` (`colab_utils.shards.records`)
   gives what the image's JSON in the shard holds.
4. **Shard** (`colab_utils.shards.write`, `jobs`, `arrays`, `index`): `write_shards` puts image and
   record into a tar that WebDataset reads. Beside it lies the file of arrays: offsets, boxes,
   labels and packed masks. `index.json` comes last.
5. **Copy** (`colab_utils.shards.copy`): `copy_shards` brings the shards from Drive to the SSD,
   checked on the way. `Arrival` (`colab_utils.loading.arrival`) does it in a thread while training
   has begun, and lets the shards take turns on a small disk; the readers of `ArrivingShards`
   (`colab_utils.loading.arriving`) wait for them.
6. **Dataset** (`colab_utils.loading.dataset`): `ShardDataset` opens the arrays of all shards, and
   reads their files by `ShardFiles` (`colab_utils.loading.readers`). ``dataset[i]`` gives
   ``(image, target)`` as torchvision's references do. For batches it has two faster doors:
   `describe` gives the tables of some images without reading a file; `read_into` writes one image's
   pixels and mask bits into memory of the caller. `CocoFolder` is the same contract over loose
   files: it does step 2 for each sample, and needs no 3 to 5. What both share is `CocoSamples`
   (`colab_utils.loading.samples`).
7. **Order** (`colab_utils.loading.sampler`): `BatchSampler` lists the epoch's batches, from seed
   and epoch, from the order in which shards arrive, or from a sampler of yours.
8. **Job** (`colab_utils.loading.prefetcher`): the `Prefetcher` keeps workers busy some batches
   ahead. It sends the indices of one batch through a worker's pipe, with the number of a shared
   buffer. A batch that is not there in time moves to the end of the epoch: see `BoundedPrefetcher`
   (`colab_utils.loading.late`). Workers start anew where `digest_dataset`
   (`colab_utils.loading.digest`) shows, when an epoch begins, that the dataset has changed.
9. **Worker** (`colab_utils.loading.fetcher`): a `Fetcher` reads the images with `read_into`, where
   `colab_utils.data.decoding` decodes each JPEG. Anybody's own dataset gives samples instead:
   `seed_random` sets their random numbers, and `pack_target` (`colab_utils.loading.targets`)
   checks them and packs their masks.
10. **Batch** (`colab_utils.loading.batch`): `write_batch` lays pixels, bits and tables one after
    another into the `SharedBuffer` (`colab_utils.loading.shared_memory`). Five integers
    (`BatchShape`) go back through the pipe. `open_batch` sees the same memory as a `PackedBatch`,
    without a copy.
11. **Device** (`colab_utils.loading.loader`): `Loader` sends the flat tensors to the device;
    ``deliver="packed"`` ends here. ``deliver="dense"`` makes float images and targets there:
    `colab_utils.loading.masks` expands the bits into dense masks (without a GPU, the worker has
    done it). Users' own transforms come last. The buffer is used again when nobody holds the batch.

How many workers do this is tried out by `tune_workers` (`colab_utils.loading.tune`). How long each
batch was waited for is noted by `LoopClock` (`colab_utils.loading.clock`).
"""
