//! The recorded working set: stored beside everything else, and part of no digest.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use sterna_store::{
    FileBases, ImageStore, Key, PAGE_BYTES, PageRange, Place, StoreError, StoredImage, WriteOptions,
    put_working_set,
};

use crate::common::{assert_has, put, ram, write};

fn range(block: u32, first: u64, count: u32) -> PageRange {
    PageRange { block, count, first }
}

#[test]
fn working_set_changes_neither_digest_nor_pages_and_layers_keep_their_base() {
    let mut rng = sterna_testing::random("working_set_changes_neither");
    let directory = tempfile::tempdir().unwrap();
    let (base, top) = (directory.path().join("base"), directory.path().join("top"));
    for key in [None, Some(Key::new([5; 32]))] {
        let ram = ram(&mut rng);
        let options =
            |base| WriteOptions { base, key: key.clone(), replace: true, ..WriteOptions::default() };
        let written = write(&base, &ram, options(None)).unwrap();
        let open = |path: &Path| StoredImage::open(path, key.as_ref()).unwrap();
        write(&top, &ram, options(Some(open(&base)))).unwrap();
        std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o600)).unwrap();
        let before = open(&base);

        let (one, two) = ([range(1, 0, 1), range(0, 0, 1)], [range(0, 0, 1)]);
        put_working_set(&base, key.as_ref(), written.digest, &one).unwrap();
        assert_eq!(open(&base).working_set(), one);
        put_working_set(&base, key.as_ref(), written.digest, &two).unwrap();

        let image = open(&base);
        assert_eq!((image.digest(), image.working_set()), (written.digest, &two[..]));
        assert_has(&image, &ram);
        assert_has(&before, &ram);
        assert!(before.working_set().is_empty());
        let layer = open(&top);
        assert_has(&layer, &ram);
        assert_eq!(layer.working_set(), two, "that of the base");
        assert_eq!(base.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        // A copy has it, too.
        let copy = directory.path().join("copy");
        let writer =
            sterna_store::ImageWriter::create(&copy, image.blocks().to_vec(), options(None)).unwrap();
        image.copy(writer, 2).unwrap();
        assert_eq!(open(&copy).working_set(), two);
    }
    let left = directory.path().read_dir().unwrap().count();
    assert_eq!(left, 3, "no temporary file is left");
}

#[test]
fn working_set_outside_of_ram_or_of_another_image_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let ram = vec![vec![1; 3 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    let written = write(&path, &ram, WriteOptions::default()).unwrap();
    let bytes = std::fs::read(&path).unwrap();

    for wrong in [range(2, 0, 1), range(0, 3, 1), range(0, 2, 2), range(0, 0, 0), range(0, u64::MAX, 2)] {
        let refused = put_working_set(&path, None, written.digest, &[wrong]).unwrap_err();
        assert!(matches!(refused, StoreError::Request(_)), "{refused}");
    }
    let other = put_working_set(&path, None, sterna_store::Digest([1; 32]), &[]).unwrap_err();
    assert!(matches!(other, StoreError::Changed { .. }), "{other}");
    assert!(std::fs::read(&path).unwrap() == bytes);
}

#[test]
fn changed_working_set_is_found_and_names_no_other_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let ram = vec![vec![1; 3 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    let written = write(&path, &ram, WriteOptions::default()).unwrap();
    put_working_set(&path, None, written.digest, &[range(0, 1, 1)]).unwrap();
    let sound = std::fs::read(&path).unwrap();
    // The footer has 64 bytes, and before it is the last range.
    let at = sound.len() - 64 - 1;
    let mut changed = sound.clone();
    changed[at - 7] ^= 1;
    std::fs::write(&path, &changed).unwrap();

    match StoredImage::open(&path, None).unwrap_err() {
        StoreError::Broken { part: "the index", rule, paragraph: "§4", .. } => {
            assert!(rule.contains("seal"), "{rule}")
        }
        error => panic!("{error}"),
    }
}

#[test]
fn working_set_of_a_stores_image_is_there_under_each_of_its_names() {
    let directory = tempfile::tempdir().unwrap();
    for key in [None, Some(Key::new([6; 32]))] {
        let place = directory.path().join(if key.is_some() { "keyed" } else { "plain" });
        let store: ImageStore = Place::store(&place, key.clone(), true).unwrap();
        let ram = vec![vec![1; 3 * PAGE_BYTES], vec![2; PAGE_BYTES]];
        let blocks = |ram: &[Vec<u8>]| {
            let block = |(bytes, name): (&Vec<u8>, &str)| sterna_store::Block {
                name: name.to_owned(),
                length_bytes: bytes.len() as u64,
                address: None,
            };
            ram.iter().zip(["pc.ram", "pc.bios"]).map(block).collect::<Vec<_>>()
        };
        let options = WriteOptions { key: key.clone(), ..WriteOptions::default() };
        let digest = put(store.writer("a", blocks(&ram), options).unwrap(), &ram).unwrap().digest;

        store.put_working_set("a", digest, &[range(0, 1, 2)]).unwrap();

        let image = store.image("a").unwrap();
        assert_eq!((image.digest(), image.working_set()), (digest, &[range(0, 1, 2)][..]));
        assert_has(&image, &ram);
        assert_eq!(store.collect().unwrap().images, 0);
        let other = store.put_working_set("a", sterna_store::Digest([1; 32]), &[]).unwrap_err();
        assert!(matches!(other, StoreError::Changed { .. }), "{other}");
    }
}

#[test]
fn base_is_found_by_its_digest_in_a_directory_with_other_files() {
    let directory = tempfile::tempdir().unwrap();
    let (bases, top) = (directory.path().join("bases"), directory.path().join("top"));
    std::fs::create_dir_all(bases.join("a directory")).unwrap();
    let ram = vec![vec![1; 3 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    let base = bases.join("x");
    write(&base, &ram, WriteOptions::default()).unwrap();
    write(
        &top,
        &ram,
        WriteOptions { base: Some(StoredImage::open(&base, None).unwrap()), ..Default::default() },
    )
    .unwrap();
    std::fs::rename(&base, bases.join("renamed")).unwrap();
    // Its name leads to another image.
    write(&base, &[ram[0].clone(), vec![9; PAGE_BYTES]], WriteOptions::default()).unwrap();
    std::fs::write(bases.join("short"), "x").unwrap();

    let open = |bases: &FileBases| {
        let blob = std::sync::Arc::new(sterna_store::FileBlob::open(&top).unwrap());
        StoredImage::open_blob(blob, None, bases)
    };
    assert_has(&open(&FileBases::beside(&top).and(&bases)).unwrap(), &ram);
    std::fs::remove_file(bases.join("renamed")).unwrap();
    let missing = open(&FileBases::beside(&top).and(&bases)).unwrap_err();
    assert!(matches!(missing, StoreError::BaseMissing { .. }), "{missing}");
}

#[test]
fn layer_never_replaces_an_image_of_its_own_chain() {
    let directory = tempfile::tempdir().unwrap();
    let (base, top) = (directory.path().join("base"), directory.path().join("top"));
    let ram = vec![vec![1; 3 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    write(&base, &ram, WriteOptions::default()).unwrap();
    let over = |path: &Path| {
        let base = Some(StoredImage::open(path, None).unwrap());
        WriteOptions { base, replace: true, ..WriteOptions::default() }
    };
    write(&top, &ram, over(&base)).unwrap();

    for (target, its_base) in [(&base, &base), (&base, &top), (&top, &top)] {
        let refused = write(target, &ram, over(its_base)).unwrap_err();
        assert!(matches!(refused, StoreError::Request(_)), "{refused}");
    }
    write(&top, &ram, over(&base)).unwrap();
    assert_has(&StoredImage::open(&top, None).unwrap(), &ram);
}

#[test]
fn level_that_adapts_gives_an_image_like_any_other() {
    let mut rng = sterna_testing::random("level_that_adapts");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let ram = ram(&mut rng);

    let written = write(&path, &ram, WriteOptions { adapts: true, ..WriteOptions::default() }).unwrap();

    assert!((-5..=15).contains(&written.level), "{written:?}");
    let image = StoredImage::open(&path, None).unwrap();
    assert_has(&image, &ram);
    assert!(image.check(2).unwrap().damage.is_empty());
}
