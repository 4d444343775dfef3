//! Servers that fail.

use std::time::Duration;

use sterna_s3::{S3Objects, S3Options};
use sterna_store::{Condition, Objects, StoreError};

use crate::server::{Fault, SECRET, Server};

const CONTENT: &[u8] = b"0123456789abcdef";

fn stored() -> (Server, S3Objects) {
    let server = Server::start();
    let storage = server.objects();
    storage.put("x", CONTENT, Condition::Always).unwrap();
    (server, storage)
}

#[test]
fn failure_of_a_moment_is_repeated() {
    let (server, storage) = stored();
    let blob = storage.open("x").unwrap();
    let faults = [Fault::Status(500), Fault::Status(503), Fault::CloseEarly, Fault::WrongRange];
    for fault in faults.into_iter().chain([Fault::WholeObject, Fault::LieAboutLength, Fault::LoseAnswer]) {
        server.fail(&[fault, fault]);
        let mut part = [0; 8];
        blob.read_exact_at(4, &mut part).unwrap();
        assert_eq!(&part, &CONTENT[4..12], "{fault:?}");
    }
}

#[test]
fn attempts_have_a_limit_and_the_error_says_so() {
    let (server, storage) = stored();
    let before = server.requests();
    server.fail(&[Fault::Status(503); 4]);

    let refused = storage.get("x", 100).unwrap_err();

    let StoreError::Remote { status: Some(503), reason, .. } = refused else { panic!("{refused:?}") };
    assert!(reason.contains("4 attempts"), "{reason}");
    assert_eq!(server.requests() - before, 4);
}

#[test]
fn wrong_range_is_never_taken_for_the_right_one() {
    let (server, storage) = stored();
    let blob = storage.open("x").unwrap();
    server.fail(&[Fault::WrongRange; 4]);

    let mut part = [0; 8];
    let refused = blob.read_exact_at(4, &mut part).unwrap_err();
    assert!(matches!(&refused, StoreError::Remote { reason, .. } if reason.contains("range")), "{refused:?}");
}

#[test]
fn wrong_secret_is_refused_at_the_first_attempt() {
    let (server, _) = stored();
    let storage = S3Objects::new(server.options("another")).unwrap();
    let before = server.requests();

    let refused = storage.get("x", 100).unwrap_err();

    assert_eq!(server.requests() - before, 1);
    let StoreError::Remote { status: Some(403), reason, .. } = refused else { panic!("{refused:?}") };
    assert!(reason.contains("SignatureDoesNotMatch") && reason.contains("credentials"), "{reason}");
    assert!(!reason.contains("another") && !reason.contains(SECRET));
}

#[test]
fn object_that_is_replaced_while_it_is_read_is_an_error() {
    let (_server, storage) = stored();
    let blob = storage.open("x").unwrap();
    storage.put("x", b"fedcba9876543210", Condition::Always).unwrap();

    assert!(matches!(blob.read_exact_at(0, &mut [0; 4]), Err(StoreError::Changed { .. })));
    storage.delete("x").unwrap();
    assert!(matches!(blob.read_exact_at(0, &mut [0; 4]), Err(StoreError::Changed { .. })));
}

/// The server has written the object, and its answer is lost. The repetition finds the own object.
#[test]
fn conditional_write_whose_answer_is_lost_succeeds() {
    let (server, storage) = stored();
    server.fail(&[Fault::LoseAnswer]);
    storage.put("new", b"mine", Condition::IfAbsent).unwrap();
    server.fail(&[Fault::LoseAnswer]);
    assert!(matches!(storage.put("x", b"other", Condition::IfAbsent), Err(StoreError::Conflict { .. })));

    for condition in [Condition::IfAbsent, Condition::Always] {
        let mut upload = storage.upload("large").unwrap();
        upload.write(&[3; 12_000]).unwrap();
        server.state.lock().unwrap().lost_completions = 1;
        let tag = upload.complete(condition).unwrap();
        assert_eq!(storage.get("large", 1 << 20).unwrap(), (vec![3; 12_000], tag));
        assert!(server.state.lock().unwrap().uploads.is_empty());
    }
    let mut second = storage.upload("large").unwrap();
    second.write(&[4; 12_000]).unwrap();
    server.state.lock().unwrap().lost_completions = 1;
    assert!(matches!(second.complete(Condition::IfAbsent), Err(StoreError::Conflict { .. })));
    assert!(server.state.lock().unwrap().uploads.is_empty(), "it was aborted");
}

#[test]
fn body_that_changed_on_its_way_is_refused_by_the_server_and_sent_again() {
    let (server, storage) = stored();
    server.fail(&[Fault::ChangedBody]);
    storage.put("x", b"whole", Condition::Always).unwrap();
    assert_eq!(storage.get("x", 10).unwrap().0, b"whole");

    let mut upload = storage.upload("large").unwrap();
    upload.write(&[5; 4_999]).unwrap();
    server.fail(&[Fault::ChangedBody; 2]);
    upload.write(&[5; 12_000]).unwrap();
    upload.complete(Condition::Always).unwrap();
    assert!(storage.get("large", 1 << 20).unwrap().0 == [5; 16_999]);
    server.fail(&[Fault::ChangedBody; 4]);
    let refused = storage.put("x", b"whole", Condition::Always);
    assert!(matches!(refused, Err(StoreError::Remote { status: Some(400), .. })), "{refused:?}");
}

#[test]
fn server_that_sends_nothing_is_left_after_the_limit() {
    let (server, _) = stored();
    let options = S3Options {
        connect_timeout: Duration::from_millis(100),
        body_timeout: Duration::from_millis(100),
        attempts: 2,
        ..server.options(SECRET)
    };
    let storage = S3Objects::new(options).unwrap();
    server.fail(&[Fault::Hang, Fault::Hang]);

    let refused = storage.get("x", 100).unwrap_err();
    assert!(
        matches!(&refused, StoreError::Remote { reason, .. } if reason.contains("in time")),
        "{refused:?}"
    );
}

#[test]
fn object_that_is_longer_than_its_reader_accepts_is_refused() {
    let (_server, storage) = stored();

    assert!(matches!(storage.get("x", 15), Err(StoreError::TooLarge { limit_bytes: 15, .. })));
    assert_eq!(storage.get("x", 16).unwrap().0, CONTENT);
}
