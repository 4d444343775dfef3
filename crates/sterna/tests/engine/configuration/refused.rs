//! Sources that do not fit. The destination waits for the next one, and its machine is not made.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna::error::ConfigurationDifference;
use sterna::{
    Capabilities, Compression, Fault, Incoming, MigrationError, Parameters, SettingLimits, SettingsError,
    SharedSettings, StartError, Status,
};

use super::{Host, as_source, assert_arrives, difference, failed, own, source, start};
use crate::common::multifd;
use crate::support::{small, vms};

#[test]
fn setting_beyond_a_limit_is_named_at_both_sides_and_the_next_source_may_come() {
    let limits = SettingLimits {
        multifd_channels: 2,
        compressions: vec![Compression::Zlib],
        postcopy: false,
        reconnect_window: Duration::from_secs(5),
    };
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait_at(super::LOOPBACK, own(), SharedSettings::AsSource(limits));
    let (two, on) = multifd(2);
    let zstd = Parameters { multifd_compression: Compression::Zstd, ..two.clone() };
    let window = Parameters { reconnect_window: Duration::from_secs(6), ..two.clone() };
    let postcopy = Capabilities { postcopy_ram: true, ..on };
    for (settings, name, value, limit) in [
        (multifd(3), "multifd-channels", "3", "1 to 2"),
        ((zstd, on), "multifd-compression", "zstd", "only off, zlib"),
        ((window, on), "x-sterna-reconnect-window", "6000", "1 to 5000"),
        ((two.clone(), postcopy), "postcopy-ram", "on", "only off"),
    ] {
        let migration = start(&source, &incoming, &settings);
        let error = failed(&migration, &source);
        assert_eq!(error.fault(), Some(Fault::PeerIncompatible), "{error}");
        let ConfigurationDifference::Setting { setting, value: theirs, limit: accepted } = difference(error)
        else {
            panic!("another difference")
        };
        assert_eq!((setting.as_str(), theirs.as_deref(), accepted.as_str()), (name, Some(value), limit));
        host.is_warned_of(&format!("{name} is {value} at the source, and the destination accepts {limit}"));
        assert_eq!((incoming.status(), host.calls()), (Status::Setup, 0), "the next one may come");
    }
    let migration = start(&source, &incoming, &(two, on));
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn different_settings_are_refused_before_the_machine_is_made() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait_at(super::LOOPBACK, multifd(2), SharedSettings::AsHere);
    for (settings, value) in [(multifd(4), Some("4")), (own(), None)] {
        let error = failed(&start(&source, &incoming, &settings), &source);
        let ConfigurationDifference::Setting { setting, value: theirs, limit } = difference(error) else {
            panic!("another difference")
        };
        assert_eq!(
            (setting.as_str(), theirs.as_deref(), limit.as_str()),
            ("multifd-channels", value, "only 2")
        );
    }
    assert_eq!(host.calls(), 0);
    let migration = start(&source, &incoming, &multifd(2));
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn address_that_carries_no_configuration_is_refused() {
    let none = |_: &[u8]| unreachable!("no source comes");
    for at in ["file:/tmp/image", "rdma:10.0.0.1:0"] {
        let (params, capabilities) = own();
        let at = at.parse().unwrap();
        let refused = Incoming::listen_with(&at, params, capabilities, as_source(), Arc::new(()), none);
        let why = refused.map(drop).unwrap_err();
        assert!(matches!(why, StartError::Settings(SettingsError::ConfigurationNeedsSocket)), "{why}");
    }
}

#[test]
fn source_without_a_configuration_says_so_and_the_next_one_may_come() {
    let ((plain, _), host) = (vms(), Arc::new(Host::default()));
    let incoming = host.wait();
    let error = failed(&start(&plain, &incoming, &multifd(2)), &plain);
    assert!(matches!(difference(error), ConfigurationDifference::NoneHere));
    assert_eq!(plain.configured.load(Ordering::SeqCst), 1);
    assert_eq!((incoming.status(), host.calls()), (Status::Setup, 0));
    drop(plain);

    let source = source(&small());
    let migration = start(&source, &incoming, &multifd(2));
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn source_without_return_path_cannot_be_asked() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait();
    let (params, capabilities) = own();
    let deaf = Capabilities { return_path: false, ..capabilities };
    failed(&start(&source, &incoming, &(params, deaf)), &source);
    host.is_warned_of("the source sent no configuration");
    assert_eq!((incoming.status(), host.calls()), (Status::Setup, 0));
}

#[test]
fn configuration_that_is_too_long_is_not_sent() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait();
    *source.configuration.lock().unwrap() = Some(vec![b'x'; (1 << 20) + 1]);
    let error = failed(&start(&source, &incoming, &own()), &source);
    assert!(matches!(error, MigrationError::Wire { .. }) && error.fault() == Some(Fault::Local), "{error}");
    assert!(error.to_string().contains("1048577 bytes"), "{error}");
    assert_eq!(host.calls(), 0);
}
