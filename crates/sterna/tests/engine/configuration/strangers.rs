//! Connections of others: strangers, QEMUs, older Sternas, a second source.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::{Incoming, Status};
use sterna_wire::extension::{CONFIGURATION_PING, EXTENSION_PING, FENCE_PING, Features, SourceConfiguration};
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_footer, encode_length_prefixed,
};
use sterna_wire::return_path::ReturnMessage;

use super::{Host, LOOPBACK, as_source, assert_arrives, failed, own, source, start};
use crate::common::multifd;
use crate::support::{eventually, port, small, warnings};

/// The beginning of a stream, up to these PINGs.
fn beginning(pings: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    FileHeader.encode(&mut bytes);
    let configuration = Configuration { machine_type: "pc-q35".into(), ..Configuration::default() };
    configuration.encode(&mut bytes).unwrap();
    Command::OpenReturnPath.encode(&mut bytes).unwrap();
    pings.iter().for_each(|ping| Command::Ping(*ping).encode(&mut bytes).unwrap());
    bytes
}

/// A section with this body.
fn section(version: u32, body: &[u8]) -> Vec<u8> {
    let (mut bytes, name) = (Vec::new(), SourceConfiguration::SECTION_NAME);
    SectionHeader { id: 2, name, instance: 0, version }.encode_full(&mut bytes).unwrap();
    encode_length_prefixed(body, &mut bytes).unwrap();
    encode_footer(2, &mut bytes);
    bytes
}

/// Sends these bytes, and returns the destination's messages until it closes.
fn answers(incoming: &Incoming, bytes: &[u8]) -> Vec<ReturnMessage> {
    let mut socket = TcpStream::connect(("127.0.0.1", port(&incoming.address()))).unwrap();
    // A destination that refuses may close before it has read everything.
    let _ = socket.write_all(bytes);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    let (mut messages, mut rest) = (Vec::new(), answer.as_slice());
    while let Some((message, used)) = ReturnMessage::decode(rest).unwrap() {
        messages.push(message);
        rest = &rest[used..];
    }
    messages
}

/// RAM's START section, as any source sends it first that sends no configuration.
fn ram_start() -> Vec<u8> {
    let mut bytes = Vec::new();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut bytes).unwrap();
    bytes.extend([0; 64]);
    bytes
}

#[test]
fn qemu_and_older_sterna_are_told_by_shut_and_the_operator_by_name() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait();
    let qemu = answers(&incoming, &[beginning(&[1]), ram_start()].concat());
    assert_eq!(qemu, [ReturnMessage::Pong(1), ReturnMessage::Shut(1)]);
    host.is_warned_of("the source sent no configuration, and this side makes its VM from one");

    let asks = beginning(&[1, EXTENSION_PING, FENCE_PING]);
    let older = answers(&incoming, &[asks, ram_start()].concat());
    let only = Features::CONFIGURATION.to_pong();
    let pongs = [1, EXTENSION_PING, only, FENCE_PING].map(ReturnMessage::Pong);
    assert_eq!(older, [&pongs[..], &[ReturnMessage::Shut(1)]].concat());

    assert_eq!((incoming.status(), host.calls()), (Status::Setup, 0));
    assert_arrives(&start(&source, &incoming, &multifd(2)), &incoming, &host);
}

#[test]
fn hostile_sources_make_no_machine_and_leave_the_place_free() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait();
    let asks = || beginning(&[1, EXTENSION_PING, FENCE_PING]);
    let asked = |body: &[u8], version: u32| {
        let mut bytes = [asks(), section(version, body)].concat();
        Command::Ping(CONFIGURATION_PING).encode(&mut bytes).unwrap();
        bytes
    };
    let unread = |bytes: &[u8]| answers(&incoming, bytes).last().cloned();

    // The length alone is refused, although no byte of the body follows.
    let mut huge = [asks(), section(1, &[])].concat();
    let at = huge.len() - 9;
    huge[at..at + 4].copy_from_slice(&(2_u32 << 20).to_be_bytes());
    huge.truncate(at + 4);
    assert_eq!(unread(&huge), Some(ReturnMessage::Shut(1)));
    host.is_warned_of("2097152 bytes of section \"sterna/configuration\"");

    for (bytes, why) in [
        (asked(&[], 1), "it ends inside the settings"),
        (asked(&[9, 1], 1), "it ends inside the settings"),
        (asked(&[0], 7), "version 7, only 1 is known"),
        (asked(&[1, 1, b'x', 1, b'y'], 1), "x is y at the source"),
        (asked(b"\x01\x10multifd-channels\x01a", 1), "multifd-channels is a at the source"),
    ] {
        let answer = unread(&bytes);
        assert!(matches!(answer, Some(ReturnMessage::ConfigurationRefused(_))), "{answer:?}, {why}");
        host.is_warned_of(why);
    }
    // A PING without a configuration; bytes after it; a machine that is asked for twice.
    let mut early = asks();
    Command::Ping(CONFIGURATION_PING).encode(&mut early).unwrap();
    assert_eq!(unread(&early), Some(ReturnMessage::Shut(1)));
    let more = [asked(&[0], 1), vec![0x51]].concat();
    assert!(matches!(unread(&more), Some(ReturnMessage::ConfigurationRefused(_))));
    for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"STNQ", b"QEVM\0\0\0\x09"] {
        assert_eq!(unread(bytes), None);
    }
    assert_eq!((incoming.status(), host.calls()), (Status::Setup, 0));
    assert_arrives(&start(&source, &incoming, &own()), &incoming, &host);
}

#[test]
fn silent_strangers_and_lanes_of_nobody_do_not_delay_the_source() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait();
    let connect = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(("127.0.0.1", port(&incoming.address()))).unwrap();
        socket.write_all(bytes).unwrap();
        socket
    };
    let mut lane = Vec::new();
    lane.extend(sterna_wire::multifd::InitialPacket { uuid: [0; 16], id: 0 }.to_bytes());
    let _held = [
        connect(b""),
        connect(&beginning(&[1, EXTENSION_PING, FENCE_PING])),
        connect(&lane),
        connect(&lane),
        connect(&[0x11, 0x22, 0x33, 0x44]),
    ];
    assert_arrives(&start(&source, &incoming, &multifd(2)), &incoming, &host);
}

#[test]
fn second_source_waits_for_the_first_and_is_refused() {
    let (first, second, host) = (source(&small()), source(&small()), Arc::new(Host::default()));
    let ((begun, has_begun), (go, gone)) = (channel(), channel::<()>());
    let (making, gone) = (Arc::clone(&host), Mutex::new(gone));
    let (params, capabilities) = own();
    let make = move |configuration: &[u8]| {
        begun.send(()).unwrap();
        let _ = gone.lock().unwrap().recv();
        making.make(configuration)
    };
    let at = LOOPBACK.parse().unwrap();
    let observer = host.told.clone();
    let incoming = Incoming::listen_with(&at, params, capabilities, as_source(), observer, make).unwrap();
    let migration = start(&first, &incoming, &multifd(2));
    has_begun.recv_timeout(Duration::from_secs(20)).unwrap();

    let late = start(&second, &incoming, &multifd(2));
    eventually("the second source sends its configuration", || {
        second.configured.load(std::sync::atomic::Ordering::SeqCst) > 0
    });
    drop(go);
    let error = failed(&late, &second).to_string();
    assert!(error.contains("this side has made its VM for another source"), "{error}");
    assert_arrives(&migration, &incoming, &host);

    // A third one comes when the guest is here.
    failed(&start(&second, &incoming, &own()), &second);
    let told = || warnings(&host.told.events());
    let refused = || told().iter().filter(|text| text.contains("made its VM for another source")).count();
    eventually(&format!("both are refused: {:?}", told()), || refused() == 2);
}
