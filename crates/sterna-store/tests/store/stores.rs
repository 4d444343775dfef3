//! Stores: shared frames, names, garbage collection beside saves and after crashes.

use std::path::Path;
use std::sync::Arc;

use sterna_store::{
    Block, Condition, DirectoryObjects, ImageStore, Key, Listed, Objects, PAGE_BYTES, StoreError,
    WriteOptions,
};

use crate::common::{assert_has, put, ram};

fn store(directory: &Path, key: Option<Key>) -> ImageStore {
    ImageStore::new(Arc::new(DirectoryObjects::create(directory).unwrap()), key)
}

fn blocks(ram: &[Vec<u8>]) -> Vec<Block> {
    let block = |(bytes, name): (&Vec<u8>, &str)| Block {
        name: name.to_owned(),
        length_bytes: bytes.len() as u64,
        address: None,
    };
    ram.iter().zip(["pc.ram", "pc.bios"]).map(block).collect()
}

fn save(store: &ImageStore, name: &str, ram: &[Vec<u8>], options: WriteOptions) -> Result<u64, StoreError> {
    Ok(put(store.writer(name, blocks(ram), options)?, ram)?.bytes)
}

fn noise(rng: &mut fastrand::Rng, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| rng.u8(..)).collect()
}

#[test]
fn second_image_of_equal_ram_takes_no_room_for_frames() {
    let mut rng = sterna_testing::random("second_image");
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let first = vec![noise(&mut rng, 1 << 20), noise(&mut rng, 64 << 10)];
    let mut second = first.clone();
    second[0][..PAGE_BYTES].fill(1);

    let all = save(&store, "one", &first, WriteOptions::default()).unwrap();
    let more = save(&store, "two", &second, WriteOptions::default()).unwrap();

    assert!(all > 1 << 20 && more < 80 << 10, "{all}, then {more}");
    assert_has(&store.image("one").unwrap(), &first);
    assert_has(&store.image("two").unwrap(), &second);
    let names: Vec<String> = store.list().unwrap().into_iter().map(|named| named.name).collect();
    assert_eq!(names, ["one", "two"]);
    let stat = store.stat().unwrap();
    assert_eq!((stat.names, stat.images, stat.packs, stat.leases), (2, 2, 2, 0));
    assert!(stat.pack_bytes < stat.named_bytes);
}

#[test]
fn collection_removes_what_no_name_leads_to_and_nothing_else() {
    let mut rng = sterna_testing::random("collection_removes");
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let mut images = Vec::new();
    for number in 0..12 {
        if rng.bool() || images.is_empty() {
            let ram = ram(&mut rng);
            save(&store, &format!("n{number}"), &ram, WriteOptions::default()).unwrap();
            images.push((format!("n{number}"), ram));
        } else {
            let (name, _) = images.swap_remove(rng.usize(0..images.len()));
            store.remove(&name).unwrap();
        }
        if rng.bool() {
            store.collect().unwrap();
        }
        for (name, ram) in &images {
            assert_has(&store.image(name).unwrap(), ram);
        }
    }
    for (name, _) in &images {
        store.remove(name).unwrap();
    }
    store.collect().unwrap();
    let stat = store.stat().unwrap();
    assert_eq!((stat.names, stat.images, stat.packs, stat.leases), (0, 0, 0, 0));
}

#[test]
fn collection_during_a_save_removes_nothing_and_the_save_is_whole() {
    let mut rng = sterna_testing::random("collection_during_a_save");
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let ram = vec![noise(&mut rng, 256 << 10), noise(&mut rng, PAGE_BYTES)];
    save(&store, "old", &ram, WriteOptions::default()).unwrap();

    let writer = store.writer("new", blocks(&ram), WriteOptions::default()).unwrap();
    store.remove("old").unwrap();
    let collected = store.collect().unwrap();
    assert_eq!((collected.running_saves, collected.packs, collected.images), (1, 0, 0));
    put(writer, &ram).unwrap();

    assert_eq!(store.collect().unwrap().images, 1, "the index of the old image");
    assert_has(&store.image("new").unwrap(), &ram);
}

#[test]
fn save_that_is_dropped_leaves_no_image_and_its_packs_are_collected() {
    let mut rng = sterna_testing::random("save_that_is_dropped");
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let ram = vec![noise(&mut rng, 40 << 20), noise(&mut rng, PAGE_BYTES)];
    let writer =
        store.writer("new", blocks(&ram), WriteOptions { level: 0, ..WriteOptions::default() }).unwrap();
    let mut lane = writer.lane().unwrap();
    for (extent, content) in (0..).zip(ram[0].chunks(64 << 10)) {
        lane.put(0, extent, content).unwrap();
    }
    drop(lane);
    drop(writer);

    assert!(matches!(store.image("new"), Err(StoreError::Missing { .. })));
    assert_eq!(store.stat().unwrap().packs, 1);
    assert_eq!(store.collect().unwrap().packs, 1);
}

#[test]
fn save_whose_lease_was_taken_away_fails_and_gives_no_name() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let ram = vec![vec![1; PAGE_BYTES], vec![2; PAGE_BYTES]];
    let writer = store.writer("new", blocks(&ram), WriteOptions::default()).unwrap();
    for lease in directory.path().join("leases").read_dir().unwrap() {
        std::fs::remove_file(lease.unwrap().path()).unwrap();
    }

    let lost = put(writer, &ram).unwrap_err();

    assert!(matches!(lost, StoreError::LeaseLost { .. }), "{lost}");
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn name_that_exists_is_replaced_only_on_request_and_odd_names_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let (old, new) = (vec![vec![1; PAGE_BYTES]; 2], vec![vec![2; PAGE_BYTES]; 2]);
    save(&store, "a", &old, WriteOptions::default()).unwrap();

    let refused = save(&store, "a", &new, WriteOptions::default()).unwrap_err();
    assert!(matches!(refused, StoreError::Conflict { .. }), "{refused}");
    save(&store, "a", &new, WriteOptions { replace: true, ..WriteOptions::default() }).unwrap();
    assert_has(&store.image("a").unwrap(), &new);
    for name in ["", ".a", "a/b", "..", "a b", &"0".repeat(64), &"a".repeat(201)] {
        assert!(matches!(store.image(name), Err(StoreError::Request(_))), "{name}");
    }
}

#[test]
fn encrypted_image_of_a_store_shows_its_name_only_with_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let key = Key::new([8; 32]);
    let (keyed, plain) = (store(directory.path(), Some(key.clone())), store(directory.path(), None));
    let ram = vec![vec![1; PAGE_BYTES], vec![2; PAGE_BYTES]];
    save(&keyed, "secret", &ram, WriteOptions { key: Some(key), ..WriteOptions::default() }).unwrap();

    assert_has(&keyed.image("secret").unwrap(), &ram);
    assert_eq!(keyed.list().unwrap()[0].name, "secret");
    let seen = &plain.list().unwrap()[0];
    assert!(!seen.is_readable && !seen.name.contains("secret"), "{seen:?}");
    assert!(matches!(plain.image("secret"), Err(StoreError::Hidden { has_key: false, hidden: 1, .. })));
    assert!(matches!(plain.remove("secret"), Err(StoreError::Hidden { .. })));
    // Without the key the packs of the image are not known. Therefore nothing is removed.
    assert!(matches!(plain.collect(), Err(StoreError::KeyNeeded { .. })));
    assert_has(&keyed.image("secret").unwrap(), &ram);
}

#[test]
fn layer_in_a_store_keeps_its_base_when_the_name_of_the_base_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path(), None);
    let old = vec![vec![1; 4 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    let mut new = old.clone();
    new[0][..PAGE_BYTES].fill(3);
    save(&store, "base", &old, WriteOptions::default()).unwrap();
    let base = Some(store.image("base").unwrap());
    save(&store, "top", &new, WriteOptions { base, ..WriteOptions::default() }).unwrap();

    store.remove("base").unwrap();
    store.collect().unwrap();

    let image = store.image("top").unwrap();
    assert_has(&image, &new);
    assert_eq!(image.layers(), 2);
}

#[test]
fn directory_keeps_the_rules_of_an_object_storage() {
    let directory = tempfile::tempdir().unwrap();
    let objects = DirectoryObjects::create(directory.path()).unwrap();
    let conflict = |done: Result<_, StoreError>| matches!(done, Err(StoreError::Conflict { .. }));

    let first = objects.put("a/x", b"1", Condition::IfAbsent).unwrap();
    assert!(conflict(objects.put("a/x", b"2", Condition::IfAbsent)));
    let second = objects.put("a/x", b"2", Condition::IfMatch(&first)).unwrap();
    assert!(conflict(objects.put("a/x", b"3", Condition::IfMatch(&first))));
    assert!(conflict(objects.put("a/none", b"3", Condition::IfMatch(&first))));
    assert_eq!(objects.get("a/x", 10).unwrap(), (b"2".to_vec(), second));
    assert!(matches!(objects.get("a/x", 0), Err(StoreError::TooLarge { .. })));
    let open = objects.open("a/x").unwrap();
    objects.put("a/x", b"4", Condition::Always).unwrap();
    let mut byte = [0];
    open.read_exact_at(0, &mut byte).unwrap();
    assert_eq!(byte, *b"2", "an open object does not change");

    let mut upload = objects.upload("b").unwrap();
    upload.write(b"long").unwrap();
    assert!(matches!(objects.open("b"), Err(StoreError::Missing { .. })));
    drop(upload);
    objects.put("ab", b"", Condition::Always).unwrap();
    let mut keys = Vec::new();
    objects
        .list("a", &mut |listed: Listed| {
            keys.push(listed.key);
            Ok(())
        })
        .unwrap();
    assert_eq!(keys, ["a/x", "ab"]);
    objects.delete("a/x").unwrap();
    objects.delete("a/x").unwrap();
    assert!(matches!(objects.put("../x", b"", Condition::Always), Err(StoreError::Request(_))));
}
