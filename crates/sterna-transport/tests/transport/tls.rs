//! Channels with TLS: bytes, guest RAM, threads, cancelling, stalling and closing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::certificates::good_directory;
use sterna_ram::RamSlice;
use sterna_transport::{
    CancelFlag, Channel, IoPart, Tls, TlsCredentials, TlsEndpoint, TlsFault, TransportError,
};

const LIMIT: Duration = Duration::from_secs(20);

fn tls(directory: &Path, endpoint: TlsEndpoint) -> Tls {
    Tls::new(Arc::new(TlsCredentials::from_directory(directory, endpoint, true).expect("credentials")))
}

/// Two connected channels after the handshake, client first.
pub(super) fn pair() -> (Channel, Channel) {
    let directory = good_directory();
    let (client, server) = Channel::pair().expect("a pair");
    let (to, at) = (tls(directory.path(), TlsEndpoint::Client), tls(directory.path(), TlsEndpoint::Server));
    std::thread::scope(|scope| {
        let greeted = scope.spawn(|| {
            server.start_tls(&at, TlsEndpoint::Server, None, LIMIT, &CancelFlag::new()).expect("server")
        });
        client
            .start_tls(&to, TlsEndpoint::Client, Some("localhost"), LIMIT, &CancelFlag::new())
            .expect("client");
        greeted.join().expect("no panic");
    });
    (client, server)
}

pub(super) fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Memory that takes the place of guest RAM.
struct Ram(Vec<u8>);

impl Ram {
    fn slice(&mut self) -> RamSlice<'_> {
        // SAFETY: the vector is mutably borrowed while the window lives, so no other reference to it exists.
        unsafe { RamSlice::from_raw(self.0.as_mut_ptr(), self.0.len()) }
    }
}

#[test]
fn credentials_that_are_a_pipe_are_refused_and_not_waited_for() {
    for name in ["ca-cert.pem", "client-cert.pem", "client-key.pem", "ca-crl.pem"] {
        let directory = good_directory();
        let file = directory.path().join(name);
        let _ = std::fs::remove_file(&file);
        assert!(std::process::Command::new("mkfifo").arg(&file).status().expect("mkfifo").success());
        let (tell, told) = std::sync::mpsc::channel();
        let path = directory.path().to_owned();
        std::thread::spawn(move || {
            tell.send(TlsCredentials::from_directory(&path, TlsEndpoint::Client, true).map(drop))
        });
        let refused = told.recv_timeout(LIMIT * 3).expect("it waits for whoever writes the pipe");
        let error = refused.expect_err("no certificates").to_string();
        assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
    }
}

#[test]
fn channel_bytes_of_any_length_arrive_whole_and_counted() {
    let (client, server) = pair();
    let sent = pattern(1_000_003);

    let received = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rest = &sent[..];
            for len in [1, 2, 16_383, 16_384, 16_385, 300_000].into_iter().cycle() {
                let (part, behind) = rest.split_at(len.min(rest.len()));
                client.write_all(part).expect("written");
                rest = behind;
                if rest.is_empty() {
                    break;
                }
            }
        });
        let mut received = vec![0; sent.len()];
        assert_eq!(server.peek(4).expect("peeked"), &sent[..4]);
        let (head, tail) = received.split_at_mut(70_001);
        server.read_exact(head).expect("read");
        server.read_exact(tail).expect("read");
        received
    });

    assert!(received == sent);
    assert_eq!((client.bytes_written(), server.bytes_read()), (sent.len() as u64, sent.len() as u64));
    assert_eq!(server.tls_peer(), Some("C=GB,O=Example,CN=client"));
}

#[test]
fn channel_guest_ram_goes_out_and_in_with_headers_between() {
    let (client, server) = pair();
    let content = pattern(5 * 4096 + 512 * 1024);
    let mut from = Ram(content.clone());
    let mut to = Ram(vec![0; content.len()]);
    let mut next = [0; 8];

    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ram = from.slice();
            let scattered = [
                IoPart::Bytes(b"header"),
                IoPart::Ram(ram.part(0, 4096).expect("inside")),
                IoPart::Ram(ram.part(4096, 0).expect("inside")),
                IoPart::Ram(ram.part(4096, content.len() - 4096).expect("inside")),
                IoPart::Bytes(b"the next"),
            ];
            client.write_parts(&scattered).expect("written");
        });
        let mut header = [0; 6];
        server.read_exact(&mut header).expect("read");
        assert_eq!(&header, b"header");
        let ram = to.slice();
        let places = [
            ram.part(0, 3 * 4096).expect("inside"),
            ram.part(3 * 4096, content.len() - 3 * 4096).expect("inside"),
        ];
        server.read_into_ram_then(&places, &mut next).expect("read");
    });

    assert!(to.0 == content);
    assert_eq!(&next, b"the next");
}

#[test]
fn channel_both_directions_at_once_do_not_wait_for_each_other() {
    let (client, server) = pair();
    let sent = pattern(6 << 20);

    std::thread::scope(|scope| {
        for channel in [&client, &server] {
            scope.spawn(|| channel.write_all(&sent).expect("written"));
            scope.spawn(|| {
                let mut received = vec![0; sent.len()];
                channel.read_exact(&mut received).expect("read");
                assert!(received == sent);
            });
        }
    });
}

#[test]
fn finish_writing_the_peer_reads_to_the_end_and_may_still_answer() {
    let (client, server) = pair();

    client.write_all(b"last words").expect("written");
    client.finish_writing().expect("said");
    let mut words = [0; 10];
    server.read_exact(&mut words).expect("read");
    let end = server.read_some(&mut [0; 1]).expect("the end is no error");
    server.write_all(b"answer").expect("written");
    let mut answer = [0; 6];
    client.read_exact(&mut answer).expect("read");

    assert_eq!((&words, end, &answer), (b"last words", 0, b"answer"));
    assert!(matches!(client.write_all(b"more"), Err(TransportError::Tls { .. })), "nothing may follow");
}

#[test]
fn say_goodbye_the_peer_finds_the_end_behind_all_bytes() {
    let (client, server) = pair();

    client.write_all(&[7; 100]).expect("written");
    client.say_goodbye().expect("said");
    client.say_goodbye().expect("twice is once");
    let result = server.read_exact(&mut [0; 200]);

    assert!(matches!(result, Err(TransportError::Closed { offset: 100, missing: 100, .. })), "{result:?}");
}

#[test]
fn close_without_goodbye_is_the_end_of_the_stream() {
    let (client, server) = pair();

    client.write_all(b"x").expect("written");
    drop(client);
    server.read_exact(&mut [0; 1]).expect("read");

    assert_eq!(server.read_some(&mut [0; 9]).expect("QEMU does so"), 0);
}

#[test]
fn finish_reading_a_blocked_read_finds_the_end_and_writing_goes_on() {
    let (client, server) = pair();

    std::thread::scope(|scope| {
        let reading = scope.spawn(|| server.read_some(&mut [0; 1]));
        std::thread::sleep(Duration::from_millis(20));
        server.finish_reading();
        assert_eq!(reading.join().expect("no panic").expect("the end"), 0);
    });
    server.write_all(b"still here").expect("written");
    let mut words = [0; 10];
    client.read_exact(&mut words).expect("read");

    assert_eq!(&words, b"still here");
}

#[test]
fn shutdown_from_another_thread_ends_reads_and_writes_as_cancelled() {
    let (client, server) = pair();

    std::thread::scope(|scope| {
        let reading = scope.spawn(|| server.read_exact(&mut [0; 1]));
        let writing = scope.spawn(|| {
            let block = vec![1; 1 << 20];
            loop {
                if let Err(error) = server.write_all(&block) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(50));
        server.shutdown();
        assert!(reading.join().expect("no panic").expect_err("shut down").is_cancelled());
        assert!(writing.join().expect("no panic").is_cancelled());
    });
    drop(client);
}

#[test]
fn stall_a_silent_peer_ends_a_read_and_a_peer_that_reads_nothing_a_write() {
    let (client, server) = pair();
    for channel in [&client, &server] {
        channel.set_stall_limit(Some(Duration::from_millis(50)));
    }

    let read = client.read_exact(&mut [0; 1]);
    let write = server.write_all(&vec![0; 64 << 20]);

    assert!(matches!(read, Err(TransportError::Stalled { offset: 0, .. })), "{read:?}");
    assert!(matches!(write, Err(TransportError::Stalled { .. })), "{write:?}");
    let Err(TransportError::Tls { problem, .. }) = server.write_all(b"x") else {
        panic!("behind half a record nothing can follow");
    };
    assert_eq!(problem.fault(), TlsFault::Nobody, "{problem}");
}

#[test]
fn finish_writing_that_cannot_say_goodbye_ends_the_stream_all_the_same() {
    let (client, server) = pair();
    for channel in [&client, &server] {
        channel.set_stall_limit(Some(Duration::from_millis(50)));
    }
    // Fill the socket below TLS, so that it accepts no further bytes.
    while rustix::io::write(client.socket().unwrap(), &[0; 1 << 16]).is_ok() {}

    let result = client.finish_writing();

    assert!(matches!(result, Err(TransportError::Stalled { .. })), "{result:?}");
    let mut buffer = [0; 1 << 16];
    let end = loop {
        match rustix::io::read(server.socket().unwrap(), &mut buffer) {
            Ok(1..) => {}
            end => break end,
        }
    };
    assert_eq!(end, Ok(0), "the peer must find the end");
}

#[test]
fn revocation_file_without_a_list_is_refused() {
    for content in ["", "junk\n", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let directory = good_directory();
        std::fs::write(directory.path().join("ca-crl.pem"), content).expect("written");

        let result = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Server, true);

        let error = result.expect_err("revocation would be off").to_string();
        assert!(error.contains("ca-crl.pem") && error.contains("revocation list"), "{error}");
    }
}

#[test]
fn revocation_file_that_is_a_broken_link_is_refused() {
    let directory = good_directory();
    std::os::unix::fs::symlink("nowhere", directory.path().join("ca-crl.pem")).expect("linked");

    let result = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Client, true);

    let error = result.expect_err("it is not absent").to_string();
    assert!(error.contains("ca-crl.pem"), "{error}");
}

#[test]
fn start_tls_on_a_channel_that_was_used_is_refused() {
    let directory = good_directory();
    let (client, server) = Channel::pair().expect("a pair");
    client.write_all(b"x").expect("written");

    let result = client.start_tls(
        &tls(directory.path(), TlsEndpoint::Client),
        TlsEndpoint::Client,
        Some("localhost"),
        LIMIT,
        &CancelFlag::new(),
    );

    assert!(matches!(result, Err(TransportError::System { .. })), "{result:?}");
    drop(server);
}

#[test]
fn records_that_were_changed_on_the_way_are_refused() {
    let (client, server) = pair();
    // Write to the socket below TLS: a record that no session has sealed.
    rustix::io::write(
        client.socket().unwrap(),
        &[0x17, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20],
    )
    .expect("written");

    let result = server.read_exact(&mut [0; 1]);

    let error = result.expect_err("no such record").to_string();
    assert!(error.contains("TLS failed"), "{error}");
    assert!(server.read_exact(&mut [0; 1]).is_err(), "and it stays broken");
}

#[test]
fn tls_binding_is_alike_at_both_ends_and_of_one_session_only() {
    let (client, server) = pair();
    let binding = client.tls_binding();
    assert!(binding.is_some_and(|value| value != [0; 32]));
    assert_eq!(binding, server.tls_binding());
    let (another, _server) = pair();
    assert_ne!(binding, another.tls_binding());
    let (plain, _) = Channel::pair().expect("a pair");
    assert_eq!(plain.tls_binding(), None);
}
