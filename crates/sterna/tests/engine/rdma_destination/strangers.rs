//! Connections that do not belong to the migration, and settings that exclude RDMA.

use std::sync::Arc;

use sterna::error::{Difference, MigrationError, RdmaDifference};
use sterna::{Incoming, SettingsError, StartError, Status, TargetVm};
use sterna_transport::rdma::double::Settings;
use sterna_transport::rdma::{ConnectParameters, Endpoint, EndpointSizes, Fabric, RdmaError, RejectReason};
use sterna_transport::{ByteStream, CancelFlag};
use sterna_wire::rdma::{Introduction, MESSAGE_BYTES, Part};

use super::source::{Guest, Habits, Source, connect, write_all};
use super::{LONG, Lab, capabilities, small};
use crate::common;
use crate::support::{cause, eventually, has_warning, warnings};

/// Connects with any private data.
fn dial(lab: &Lab, private_data: &[u8]) -> Result<Endpoint, RdmaError> {
    let sizes = EndpointSizes::messages(MESSAGE_BYTES as u32, 4, 4);
    let route = lab.source.resolve(lab.to(), LONG, &CancelFlag::new())?;
    let endpoint = Endpoint::new(route.open(&sizes.attributes())?, &sizes)?;
    endpoint.post_receives(4)?;
    let parameters = ConnectParameters::connect(private_data);
    endpoint.connection().establish(&parameters, LONG, &CancelFlag::new())?;
    Ok(endpoint)
}

fn assert_rejected(tried: Result<Endpoint, RdmaError>) {
    let error = tried.expect_err("it was taken");
    assert!(matches!(error, RdmaError::Rejected { reason: RejectReason::BY_PEER, .. }), "{error}");
}

/// Private data of a Sterna that introduces itself.
fn introduced(part: Part, session: [u8; 16]) -> Vec<u8> {
    let introduction = Introduction { part, session, ..Habits::sterna(1).introduction.unwrap() };
    sterna_wire::rdma::ConnectRequest { pin_all: false, introduction: Some(introduction) }.to_bytes()
}

#[test]
fn stranger_is_rejected_before_anything_is_allocated_and_a_flood_is_told_in_part() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    let broken = {
        let mut bytes = introduced(Part::Main, [7; 16]);
        bytes[15] = 9;
        bytes
    };
    let wrong: [&[u8]; 6] = [
        b"\0\0\0\0\0\0\0\0",
        b"\0\0\0\x02\0\0\0\0",
        b"GET / HTTP/1.1\r\n",
        &broken,
        &introduced(Part::ReturnPath, [7; 16]),
        &introduced(Part::Lane(3), [7; 16]),
    ];
    for number in 0..120 {
        assert_rejected(dial(&lab, wrong[number % wrong.len()]));
    }

    let counts = lab.network.counts_of(&lab.destination);
    assert_eq!((counts.queue_pairs_made, counts.registrations_made), (0, 0));
    let told = warnings(&lab.log.events());
    assert!((6..100).contains(&told.len()), "{told:?}");
    assert!(has_warning(&lab.log.events(), &["10.0.0.1", "version 0"]), "{told:?}");
    assert_eq!(lab.incoming().status(), Status::Setup);
    lab.assert_next_works(&guest);
    lab.assert_empty();
}

#[test]
fn main_connection_that_was_of_no_use_gives_its_place_back() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    // The peer sends nothing, other bytes, or half of the expected bytes.
    for bytes in [&b""[..], b"GET / HTTP/1.1", b"QEVM\0\0\0\x03\x07"] {
        let (stream, ..) = connect(&lab, Habits::qemu(1).with_return_path()).unwrap();
        if !bytes.is_empty() {
            write_all(&stream, bytes).unwrap();
        }
        stream.shutdown();
        drop(stream);
        // Another connection of the same source is accepted after the end of this one was noticed.
        assert_eq!(lab.incoming().status(), Status::Setup);
    }
    lab.assert_next_works(&guest);
    lab.assert_empty();
}

#[test]
fn second_source_is_rejected_while_one_is_there_and_the_first_arrives() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    let source = Source::start(&lab, &guest, Habits::sterna(1));

    assert_rejected(dial(&lab, &introduced(Part::Main, [7; 16])));
    assert_rejected(dial(&lab, &introduced(Part::Main, [8; 16])));
    assert_rejected(dial(&lab, &introduced(Part::ReturnPath, [8; 16])));
    // The part is correct, but the stream has begun.
    assert_rejected(dial(&lab, &introduced(Part::ReturnPath, [7; 16])));
    // As a QEMU opens its return path.
    assert_rejected(dial(&lab, b"\0\0\0\x01\0\0\0\0"));

    let stream = source.run();
    lab.assert_arrived(&guest);
    assert_rejected(dial(&lab, b"\0\0\0\x01\0\0\0\0"));
    drop(stream);
    lab.assert_empty();
}

#[test]
fn source_that_wants_answers_and_made_one_connection_is_told_what_to_set() {
    let guest = Guest::new(&small()).with_return_path();
    let lab = Lab::with(Settings::new(), &small(), |_| ());

    assert!(Source::try_start(&lab, &guest, Habits::qemu(1)).is_err());

    let error = lab.assert_failed();
    let MigrationError::PeerIncompatible(Difference::Rdma(why)) = &error else { panic!("{error}") };
    assert_eq!(*why, RdmaDifference::ReturnPath);
    lab.assert_empty();
}

#[test]
fn address_can_be_listened_at_again_and_names_of_hosts_are_looked_up() {
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    let at: sterna::Address = lab.incoming().address();
    let mut params = common::parameters();
    params.rdma.fabric = Some(Arc::new(lab.destination.clone()));
    let listen = |at: &str| {
        let vm: Arc<dyn TargetVm> =
            crate::support::TestVm::new(sterna_guests::process::ProcessGuest::waiting(small()).unwrap());
        Incoming::listen(vm, &at.parse().unwrap(), params.clone(), capabilities(), Arc::new(()))
    };
    let taken = listen(&at.to_string()).err().expect("listened at twice").to_string();
    assert!(taken.contains(&at.to_string()), "{taken}");
    let destination = lab.destination.clone();
    let network = lab.network.clone();
    drop(lab);
    drop(listen(&at.to_string()).unwrap());
    // Listens on all addresses.
    drop(listen("rdma::4444").unwrap());
    let nowhere = listen("rdma:192.0.2.1:0").err().expect("listened elsewhere");
    let Some(RdmaError::NoDevice { address, having }) = cause(&nowhere) else { panic!("{nowhere:?}") };
    assert!(address.starts_with("192.0.2.1"), "{nowhere}");
    assert!(having.iter().any(|address| address.starts_with("10.0.0.2")), "{nowhere}");
    eventually("the listeners' ends", || network.counts_of(&destination).listeners == 0);
}

#[test]
fn what_does_not_go_with_rdma_is_refused_with_the_reason() {
    let vm = || -> Arc<dyn TargetVm> {
        crate::support::TestVm::new(sterna_guests::process::ProcessGuest::waiting(small()).unwrap())
    };
    let at = "rdma:10.0.0.2:0".parse().unwrap();
    let refusal = |multifd, mapped_ram| {
        let capabilities = sterna::Capabilities { multifd, mapped_ram, ..capabilities() };
        let params =
            sterna::Parameters { multifd_compression: sterna::Compression::Zstd, ..common::parameters() };
        match Incoming::listen(vm(), &at, params, capabilities, Arc::new(())).err() {
            Some(StartError::Settings(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal(true, false), SettingsError::RdmaIsUncompressed);
    assert_eq!(refusal(false, true), SettingsError::MappedNeedsFile);
}
