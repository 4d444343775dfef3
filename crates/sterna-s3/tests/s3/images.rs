//! Images and stores in an object storage, through the cache.

use std::sync::Arc;
use std::time::SystemTime;

use sterna_s3::S3Storages;
use sterna_store::{
    Block, CacheOptions, CachedObjects, FileBases, ImageStore, ImageWriter, Objects, PAGE_BYTES, Piece,
    Place, RangeCache, Recipe, Storages, StoreError, StoredImage, WriteOptions,
};

use crate::server::{Fault, SECRET, Server};

const RAM: usize = 3 << 20;

pub(crate) fn noise(seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..RAM).map(|_| rng.u8(..)).collect()
}

pub(crate) fn blocks() -> Vec<Block> {
    vec![Block { name: "ram".to_owned(), length_bytes: RAM as u64, address: None }]
}

pub(crate) fn fill(writer: ImageWriter, ram: &[u8]) -> Result<(), StoreError> {
    let mut lane = writer.lane()?;
    for (extent, content) in (0..).zip(ram.chunks(writer.extent_bytes() as usize)) {
        lane.put(0, extent, content)?;
    }
    drop(lane);
    let mut recipe = Recipe::default();
    recipe.push(Piece::Copy { block: 0, offset: 0, length: RAM as u64 });
    writer.complete(&[("memory", recipe)]).map(|_| ())
}

fn cached(server: &Server, options: &CacheOptions) -> Arc<dyn Objects> {
    let cache = Arc::new(RangeCache::new(options).unwrap());
    Arc::new(CachedObjects::new(Arc::new(server.objects()), cache))
}

pub(crate) fn open(objects: &Arc<dyn Objects>, key: &str) -> Result<Arc<StoredImage>, StoreError> {
    StoredImage::open_blob(objects.open(key)?, None, &FileBases::default())
}

pub(crate) fn assert_has(image: &StoredImage, ram: &[u8]) {
    let mut read = vec![0; RAM];
    image.read(0, 0, &mut read).unwrap();
    assert!(read == ram);
}

#[test]
fn image_in_an_object_is_uploaded_in_parts_and_read_in_few_requests() {
    let (server, ram) = (Server::start(), noise(1));
    let objects: Arc<dyn Objects> = Arc::new(server.objects());
    let writer =
        ImageWriter::create_object(Arc::clone(&objects), "a.sterna", blocks(), WriteOptions::default())
            .unwrap();
    fill(writer, &ram).unwrap();
    let before = server.requests();

    let image = open(&cached(&server, &CacheOptions::default()), "a.sterna").unwrap();
    assert_has(&image, &ram);

    // 48 frames in 13 blocks.
    assert!(server.requests() - before < 12, "{}", server.requests() - before);
    assert!(server.state.lock().unwrap().uploads.is_empty());
    let again = ImageWriter::create_object(objects, "a.sterna", blocks(), WriteOptions::default());
    assert!(matches!(again.err(), Some(StoreError::Conflict { .. })));
}

#[test]
fn image_that_is_not_completed_leaves_no_object_and_no_upload() {
    let (server, ram) = (Server::start(), noise(2));
    let objects: Arc<dyn Objects> = Arc::new(server.objects());
    let create = || ImageWriter::create_object(Arc::clone(&objects), "a", blocks(), WriteOptions::default());

    let writer = create().unwrap();
    writer.lane().unwrap().put(0, 0, &ram[..64 << 10]).unwrap();
    assert!(!server.state.lock().unwrap().uploads.is_empty());
    drop(writer);
    assert!(server.state.lock().unwrap().uploads.is_empty());

    // Every attempt of a part fails.
    let writer = create().unwrap();
    writer.lane().unwrap().put(0, 0, &ram[..64 << 10]).unwrap();
    server.state.lock().unwrap().faults.extend(vec![Fault::Status(500); 200]);
    let refused = fill(writer, &ram);
    server.state.lock().unwrap().faults.clear();
    assert!(matches!(refused, Err(StoreError::Remote { status: Some(500), .. })), "{refused:?}");
    assert!(server.state.lock().unwrap().objects.is_empty());
    objects.abort_uploads(SystemTime::now()).unwrap();
    assert!(server.state.lock().unwrap().uploads.is_empty());
}

#[test]
fn image_that_is_replaced_while_it_is_read_is_an_error_that_names_frame_and_pages() {
    let (server, ram) = (Server::start(), noise(3));
    let objects: Arc<dyn Objects> = Arc::new(server.objects());
    let put = |ram: &[u8]| {
        let options = WriteOptions { replace: true, ..WriteOptions::default() };
        fill(ImageWriter::create_object(Arc::clone(&objects), "a", blocks(), options).unwrap(), ram).unwrap();
    };
    put(&ram);
    let image = open(&cached(&server, &CacheOptions::default()), "a").unwrap();
    put(&noise(4));

    let refused = image.read(0, 1 << 20, &mut [0; PAGE_BYTES]).unwrap_err();

    let StoreError::FrameRead { name, pages, source, .. } = &refused else { panic!("{refused}") };
    assert!(matches!(**source, StoreError::Changed { .. }), "{source}");
    assert!(
        name.ends_with("pre/fix/a") && pages.contains("block ram, pages 0x100 to 0x10f"),
        "{name}: {pages}"
    );
}

#[test]
fn store_in_a_bucket_shares_frames_and_collects_garbage_and_old_uploads_but_nothing_else() {
    let (server, ram) = (Server::start(), noise(5));
    let objects = cached(&server, &CacheOptions::default());
    let store = ImageStore::new(Arc::clone(&objects), None);
    let mut second = ram.clone();
    second[..PAGE_BYTES].fill(7);
    for (name, ram) in [("one", &ram), ("two", &second)] {
        fill(store.writer(name, blocks(), WriteOptions::default()).unwrap(), ram).unwrap();
    }
    assert_has(&store.image("one").unwrap(), &ram);
    assert_has(&store.image("two").unwrap(), &second);
    let stat = store.stat().unwrap();
    assert!(stat.pack_bytes < RAM as u64 + (200 << 10) && stat.names == 2 && stat.leases == 0, "{stat:?}");

    server.state.lock().unwrap().objects.insert("pre/fix/images/cat.jpg".into(), b"cat".to_vec());
    let mut left = objects.upload("left.sterna").unwrap();
    left.write(&ram[..20_000]).unwrap();
    std::mem::forget(left);
    store.remove("one").unwrap();
    let collected = store.collect().unwrap();
    assert_eq!((collected.images, collected.packs, collected.uploads), (1, 0, 1));
    store.remove("two").unwrap();
    let collected = store.collect().unwrap();
    assert_eq!((collected.images, collected.packs), (1, 2));
    let keys: Vec<String> = server.state.lock().unwrap().objects.keys().cloned().collect();
    assert_eq!(keys, ["pre/fix/images/cat.jpg"]);
}

#[test]
fn directory_of_a_cache_serves_the_next_process_and_its_damage_is_fetched_again() {
    let (server, ram) = (Server::start(), noise(6));
    let directory = tempfile::tempdir().unwrap();
    let options =
        CacheOptions { directory: Some((directory.path().to_owned(), 64 << 20)), ..CacheOptions::default() };
    let objects: Arc<dyn Objects> = Arc::new(server.objects());
    fill(ImageWriter::create_object(objects, "a", blocks(), WriteOptions::default()).unwrap(), &ram).unwrap();
    assert_has(&open(&cached(&server, &options), "a").unwrap(), &ram);
    let before = server.requests();

    // A second cache, as another process has it. The version is asked for.
    assert_has(&open(&cached(&server, &options), "a").unwrap(), &ram);
    assert_eq!(server.requests() - before, 1);

    for parent in directory.path().read_dir().unwrap().flatten() {
        for file in std::fs::read_dir(parent.path()).into_iter().flatten().flatten() {
            let mut bytes = std::fs::read(file.path()).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(file.path(), bytes).unwrap();
        }
    }
    assert_has(&open(&cached(&server, &options), "a").unwrap(), &ram);
    assert!(server.requests() - before > 2, "damaged blocks came from the server");
}

#[test]
fn threads_that_need_the_same_block_fetch_it_once() {
    let (server, ram) = (Server::start(), noise(7));
    let objects: Arc<dyn Objects> = Arc::new(server.objects());
    fill(ImageWriter::create_object(objects, "a", blocks(), WriteOptions::default()).unwrap(), &ram).unwrap();
    let image = open(&cached(&server, &CacheOptions::default()), "a").unwrap();
    server.state.lock().unwrap().delay = std::time::Duration::from_millis(50);
    let before = server.requests();

    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let mut page = [0; PAGE_BYTES];
                image.read(0, 1 << 20, &mut page).unwrap();
                assert!(page == ram[1 << 20..][..PAGE_BYTES]);
            });
        }
    });

    // The frame may cross into a second block.
    assert!(server.requests() - before <= 2, "{}", server.requests() - before);
}

#[test]
fn address_names_bucket_and_prefix_and_layers_find_bases_beside_them() {
    let (server, ram) = (Server::start(), noise(8));
    let storages =
        S3Storages::new(server.options(SECRET), RangeCache::new(&CacheOptions::default()).unwrap());
    assert!(matches!(storages.open("s3://").err(), Some(StoreError::Request(_))));
    let Err(missing) = storages.open("s3://other").and_then(|objects| objects.get("a", 1)) else { panic!() };
    assert!(
        matches!(&missing, StoreError::Remote { reason, .. } if reason.contains("create the bucket")),
        "{missing}"
    );

    sterna_store::use_storages(Arc::new(storages));
    let place = |name: &str| Place::parse(format!("s3://bucket/some/where/{name}.sterna").as_ref()).unwrap();
    fill(place("base").writer(blocks(), WriteOptions::default()).unwrap(), &ram).unwrap();
    assert!(server.state.lock().unwrap().objects.contains_key("some/where/base.sterna"));
    let base = place("base").open(None, FileBases::default()).unwrap();
    let mut changed = ram.clone();
    changed[RAM / 2..][..PAGE_BYTES].fill(9);
    let options = WriteOptions { base: Some(base), ..WriteOptions::default() };
    fill(place("top").writer(blocks(), options).unwrap(), &changed).unwrap();

    let top = place("top").open(None, FileBases::default()).unwrap();
    assert_eq!(top.layers(), 2);
    assert_has(&top, &changed);
    server.state.lock().unwrap().objects.remove("some/where/base.sterna");
    let missing = place("top").open(None, FileBases::default());
    assert!(matches!(missing.err(), Some(StoreError::BaseMissing { .. })));
}

#[test]
fn object_that_is_longer_than_the_memory_of_the_cache_is_fetched_once_and_ahead_of_its_reader() {
    let (server, content) = (Server::start(), noise(9));
    let objects = cached(&server, &CacheOptions { memory_bytes: 300 << 10, directory: None });
    objects.put("x", &content, sterna_store::Condition::Always).unwrap();
    let blob = objects.open("x").unwrap();
    let requests = |offset: usize, length: usize| {
        let (before, mut read) = (server.requests(), vec![0; length]);
        blob.read_exact_at(offset as u64, &mut read).unwrap();
        assert!(read == content[offset..][..length], "{length} bytes at {offset}");
        server.requests() - before
    };

    // Three ranges of a mebibyte.
    assert_eq!(requests(0, RAM), 3);
    assert_eq!(requests(RAM - 5, 5), 0);
    assert!(matches!(blob.read_exact_at(RAM as u64 - 5, &mut [0; 6]), Err(StoreError::Torn { .. })));
    // The second block comes with the third one, because the reader goes forward.
    let block = 256 << 10;
    assert_eq!([requests(10, 10), requests(block + 100, 10)], [1, 1]);
    assert_eq!(requests(2 * block + 100, 10), 0);
    assert_eq!(requests(block - 5, 10), 1, "the first block did not stay");
}
