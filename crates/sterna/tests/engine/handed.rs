//! Sockets that the VMM hands over: a listening one (systemd's activation), and connected ones.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use crate::common;
use sterna::rules::{self, Features};
use sterna::{
    Address, Capabilities, DescriptorProblem, HandedFd, Incoming, Migration, Parameters, SettingsError,
    SourceVm, StartError, TargetVm,
};
use sterna_guests::process::ProcessGuest;

fn listen(
    target: &Arc<ProcessGuest>,
    at: &Address,
    (params, capabilities): &(Parameters, Capabilities),
) -> Result<Incoming, StartError> {
    let waiting: Arc<dyn TargetVm> = Arc::clone(target) as _;
    Incoming::listen(waiting, at, params.clone(), *capabilities, Arc::new(()))
}

#[test]
fn listening_socket_of_the_vmm_takes_a_guest_over_several_channels() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m");
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let bound = tcp.local_addr().unwrap();
    let unix = UnixListener::bind(&path).unwrap();
    let expected =
        [Address::Tcp { host: bound.ip().to_string(), port: bound.port() }, Address::Unix(path.clone())];
    for (given, expected) in [tcp.into(), unix.into()].into_iter().zip(expected) {
        let settings = common::multifd(3);
        let (source, target) = common::pair(&common::config());
        let incoming = listen(&target, &Address::from_listener(given).unwrap(), &settings).unwrap();
        assert_eq!(incoming.address(), expected, "the real address");
        let migration = common::start(&source, &incoming.address(), &settings.0, settings.1, Arc::new(()));
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target);
    }
    assert!(path.exists(), "the socket's file is the VMM's");
}

#[test]
fn connected_sockets_of_the_vmm_carry_a_guest_over_one_channel() {
    let settings = (common::parameters(), Capabilities::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (source, target) = common::pair(&common::config());
    let incoming = listen(&target, &Address::from_connected(theirs.into()).unwrap(), &settings).unwrap();
    let to = Address::from_connected(ours.into()).unwrap();
    let migration = common::start(&source, &to, &settings.0, settings.1, Arc::new(()));
    common::assert_arrived(&migration.wait(), &incoming.wait(), &target);
}

#[test]
fn several_channels_over_one_connected_socket_are_refused_by_name_on_both_sides() {
    let settings = common::multifd(2);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (source, target) = common::pair(&common::config());
    let is_one =
        |error: &StartError| matches!(error, StartError::Settings(SettingsError::DescriptorIsOneChannel));
    let at = Address::from_connected(theirs.into()).unwrap();
    let refused = listen(&target, &at, &settings).err().expect("one channel");
    assert!(is_one(&refused), "{refused}");
    let leaving: Arc<dyn SourceVm> = Arc::clone(&source) as _;
    let to = Address::from_connected(ours.into()).unwrap();
    let refused = Migration::start(leaving, &to, settings.0, settings.1, Arc::new(())).err().unwrap();
    assert!(is_one(&refused), "{refused}");
    common::assert_lives_on(&source);
}

/// The connection cannot be replaced, so the window would have no effect.
#[test]
fn reconnect_window_over_a_connected_socket_is_refused_on_both_sides() {
    let params = Parameters { reconnect_window: Duration::from_secs(5), ..common::parameters() };
    let settings = (params, Capabilities::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (source, target) = common::pair(&common::config());
    let is_named =
        |error: &StartError| matches!(error, StartError::Settings(SettingsError::CannotReconnect { .. }));
    let at = Address::from_connected(theirs.into()).unwrap();
    let refused = listen(&target, &at, &settings).err().expect("no window");
    assert!(is_named(&refused), "{refused}");
    let leaving: Arc<dyn SourceVm> = Arc::clone(&source) as _;
    let to = Address::from_connected(ours.into()).unwrap();
    let refused = Migration::start(leaving, &to, settings.0.clone(), settings.1, Arc::new(())).err().unwrap();
    assert!(is_named(&refused), "{refused}");
    common::assert_lives_on(&source);

    // A pipe has no connection to lose.
    let (_reader, writer) = std::io::pipe().unwrap();
    let pipe = Address::Handed(HandedFd::new(writer.into(), "pipe"));
    let features = Features::of(&pipe, &settings.0, &settings.1);
    assert_eq!(rules::check(features, rules::Side::Source), Ok(()));
}

#[test]
fn descriptor_that_is_no_listening_socket_is_refused_with_its_kind() {
    let datagram = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let refused = Address::from_listener(datagram.into()).unwrap_err();
    assert!(
        matches!(refused, sterna::TransportError::Descriptor { why: DescriptorProblem::Datagram, .. }),
        "{refused}"
    );
}
