//! What works.

use std::time::SystemTime;

use sterna_store::{Condition, Objects, StoreError};

use crate::server::Server;

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|index| (index * 7 + index / 251) as u8).collect()
}

#[test]
fn object_is_written_read_listed_and_deleted() {
    let (server, content) = (Server::start(), bytes(10_000));
    let storage = server.objects();
    let tag = storage.put("a/b", &content, Condition::Always).unwrap();

    assert_eq!(storage.get("a/b", 10_000).unwrap(), (content.clone(), tag.clone()));
    assert!(server.state.lock().unwrap().objects.contains_key("pre/fix/a/b"));
    let blob = storage.open("a/b").unwrap();
    let mut part = vec![0; 777];
    blob.read_exact_at(1234, &mut part).unwrap();
    assert_eq!(part, content[1234..][..777]);
    assert!(matches!(blob.read_exact_at(9_999, &mut part), Err(StoreError::Torn { .. })));
    storage.delete("a/b").unwrap();
    storage.delete("a/b").unwrap();
    assert!(matches!(storage.get("a/b", 1), Err(StoreError::Missing { .. })));
    assert!(matches!(storage.open("a/b"), Err(StoreError::Missing { .. })));
}

#[test]
fn long_read_is_several_ranges() {
    let (server, content) = (Server::start(), bytes(9 << 20));
    let storage = server.objects();
    server.state.lock().unwrap().objects.insert("pre/fix/long".into(), content.clone());
    let blob = storage.open("long").unwrap();
    let before = server.requests();

    let mut all = vec![0; content.len()];
    blob.read_exact_at(0, &mut all).unwrap();

    assert!(all == content);
    assert_eq!(server.requests() - before, 4);
}

#[test]
fn write_whose_condition_does_not_hold_changes_nothing() {
    let server = Server::start();
    let storage = server.objects();
    let first = storage.put("x", b"one", Condition::IfAbsent).unwrap();

    assert!(matches!(storage.put("x", b"two", Condition::IfAbsent), Err(StoreError::Conflict { .. })));
    let second = storage.put("x", b"two", Condition::IfMatch(&first)).unwrap();
    assert!(matches!(
        storage.put("x", b"three", Condition::IfMatch(&first)),
        Err(StoreError::Conflict { .. })
    ));
    assert_eq!(storage.get("x", 10).unwrap(), (b"two".to_vec(), second));
    let mut upload = storage.upload("x").unwrap();
    upload.write(&bytes(20_000)).unwrap();
    assert!(matches!(upload.complete(Condition::IfAbsent), Err(StoreError::Conflict { .. })));
    assert_eq!(storage.get("x", 10).unwrap().0, b"two");
    assert!(server.state.lock().unwrap().uploads.is_empty(), "the upload was aborted");
}

#[test]
fn upload_in_parts_is_invisible_until_its_end() {
    let (server, content) = (Server::start(), bytes(23_456));
    let storage = server.objects();
    let mut upload = storage.upload("large").unwrap();
    content.chunks(999).for_each(|part| upload.write(part).unwrap());
    assert!(server.state.lock().unwrap().objects.is_empty());
    let tag = upload.complete(Condition::IfAbsent).unwrap();

    assert_eq!(storage.get("large", 1 << 20).unwrap(), (content, tag));
    let mut small = storage.upload("small").unwrap();
    small.write(b"small").unwrap();
    small.complete(Condition::IfAbsent).unwrap();
    assert_eq!(storage.get("small", 5).unwrap().0, b"small");
}

#[test]
fn upload_that_is_dropped_or_left_is_removed() {
    let server = Server::start();
    let storage = server.objects();
    let mut dropped = storage.upload("dropped").unwrap();
    dropped.write(&bytes(20_000)).unwrap();
    assert_eq!(server.state.lock().unwrap().uploads.len(), 1);
    drop(dropped);
    assert!(server.state.lock().unwrap().uploads.is_empty());

    let mut left = storage.upload("left").unwrap();
    left.write(&bytes(20_000)).unwrap();
    std::mem::forget(left);
    assert_eq!(storage.abort_uploads(SystemTime::UNIX_EPOCH).unwrap(), 0, "it began later");
    assert_eq!(storage.abort_uploads(SystemTime::now()).unwrap(), 1);
}

#[test]
fn list_has_all_pages_in_order() {
    let server = Server::start();
    let storage = server.objects();
    for key in ["c", "a/1", "a/3", "a/2", "b"] {
        storage.put(key, key.as_bytes(), Condition::Always).unwrap();
    }
    server.state.lock().unwrap().objects.insert("pre/fixed".into(), Vec::new());
    let listed = |prefix: &str| {
        let mut keys = Vec::new();
        storage
            .list(prefix, &mut |object| {
                assert_eq!(object.length_bytes, object.key.len() as u64);
                keys.push(object.key);
                Ok(())
            })
            .unwrap();
        keys
    };

    assert_eq!(listed(""), ["a/1", "a/2", "a/3", "b", "c"]);
    assert_eq!(listed("a/"), ["a/1", "a/2", "a/3"]);
}
