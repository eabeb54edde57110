"""From samples to batches on the device.

The life of a sample, from COCO JSON to a batch on the device:

1. **Annotations** (`colab_utils.data.coco`): `read_coco` reads the JSON once. Its numbers go into
   flat arrays. An annotation stays JSON text until its image is needed.
2. **Masks** (`colab_utils.data.masks`): `encode_segmentation` turns each polygon into RLE.
   `pack_masks` turns the RLE into packed masks: each is cropped to its own box, one bit a pixel.
3. **Image** (`colab_utils.shards.records`): `store_image` keeps the original bytes, or
   shrinks an image that is larger than training needs. `make_record` makes the image's JSON for the
   shard.
4. **Shard** (`colab_utils.shards.write`, `jobs`, `arrays`, `index`): `write_shards` puts image and
   record into a tar that WebDataset reads. Beside the tar it writes a file of arrays: offsets,
   boxes, labels and packed masks. `index.json` is written last.
5. **Copy** (`colab_utils.shards.copy`): `copy_shards` copies the shards from Drive to the SSD and
   checks them. `Arrival` (`colab_utils.loading.arriving`) copies in threads while training runs.
   The readers of `ArrivingShards` wait for the files. Only one
   process of a machine copies. Without shards, `open_dataset` (`colab_utils.loading.opening`)
   opens loose files, and the process of a `Writing` (`colab_utils.loading.writing`) does steps 3
   and 4 meanwhile. A `FileCache` (`colab_utils.file_cache`) keeps the bytes for both. For other
   trainers, `copy_images` (`colab_utils.loading.image_copy`) copies loose files.
6. **Dataset** (`colab_utils.loading.dataset`): `ShardDataset` opens the arrays of all shards, and
   keeps the files open that it read last. ``dataset[i]`` returns
   ``(image, target)`` as in torchvision's references. Two faster
   methods serve batches: `describe` returns the tables of some images without reading a file, and
   `read_into` writes an image's pixels and mask bits into the caller's memory. `CocoFolder`
   (`colab_utils.loading.coco_folder`) has the same contract for loose files: it does step 2 for
   each sample, and skips steps 3 to 5. The base class of both is `CocoSamples`
   (`colab_utils.loading.samples`).
7. **Order** (`colab_utils.loading.sampler`): `BatchSampler` lists the batches of an epoch. The
   order comes from seed and epoch, in the first epoch also from the order in which shards are
   copied; or from a user's sampler. Each of several processes (`colab_utils.loading.devices`) takes
   its share of a batch.
8. **Job** (`colab_utils.loading.prefetcher`): the `Prefetcher` keeps workers some batches ahead. It
   sends the indices of a batch and the number of a shared buffer through a worker's pipe. If a
   sample does not come in time, new workers load it once more. New workers start for each pass over
   a user's own dataset, because what the last ones made of it is not known (`Fetcher.reads_as`).
9. **Worker** (`colab_utils.loading.fetcher`): a `Fetcher` reads the images with `read_into`, and
   `colab_utils.data.decoding` decodes each JPEG. Other datasets return samples instead. A
   `SamplePacker` (`colab_utils.loading.targets`) seeds their random numbers, checks them and packs
   their masks.
10. **Batch** (`colab_utils.loading.batch`): `write_batch` writes pixels, bits and tables one after
    another into the `SharedBuffer` (`colab_utils.loading.shared_memory`). The dtypes and shapes of
    the tables go back through the pipe. `open_batch` views the same memory as a `PackedBatch`,
    without a copy.
11. **Device** (`colab_utils.loading.devices`): `send` brings the flat tensors to the device. With
    ``deliver="packed"``, this is the last step. With ``deliver="dense"``, float images and targets
    are made on the device, and `colab_utils.loading.masks` expands the bits into dense masks.
    Without a GPU, the worker has already expanded the bits. The user's own transforms come last
    (`colab_utils.loading.transforms`). The buffer is used again when no tensor of the batch is
    left.

`LoopClock` (`colab_utils.loading.clock`) measures how long the loop waits for each batch. How a
worker starts, what it was asked for, and how it ended, is in `colab_utils.loading.workers`.
"""
