//! The engine with default features: precopy over TCP and Unix sockets with multifd, and nothing else.
//!
//! `cargo test --manifest-path testing/embedder/Cargo.toml --test defaults`

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sterna::{
    Address, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SettingsError, StartError,
    Tls, TlsEndpoint,
};
use sterna_embedder::Machine;

fn migrate(at: &str, capabilities: Capabilities) {
    let (source, target) = (Machine::with_guest(), Machine::new());
    let params = Parameters { multifd_channels: 3, ..Parameters::default() };
    let at: Address = at.parse().unwrap();
    let incoming = Incoming::listen(target.clone(), &at, params.clone(), capabilities, Arc::new(())).unwrap();
    let migration =
        Migration::start(source.clone(), &incoming.address(), params, capabilities, Arc::new(())).unwrap();

    let outcome = migration.wait();

    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(source.content() == target.content(), "memory differs");
}

#[test]
fn guest_moves_over_tcp_and_unix_sockets_with_and_without_multifd() {
    let home = tempfile::tempdir().unwrap();
    for multifd in [false, true] {
        let capabilities = Capabilities { multifd, ..Capabilities::default() };
        migrate("tcp:127.0.0.1:0", capabilities);
        migrate(&format!("unix:{}", home.path().join(format!("{multifd}")).display()), capabilities);
    }
}

/// The Cargo feature that both sides name when they refuse these settings.
fn refused(at: &str, params: &Parameters, capabilities: Capabilities) -> [&'static str; 2] {
    let at: Address = at.parse().unwrap();
    let observer = || Arc::new(());
    let errors = [
        Migration::start(Machine::with_guest(), &at, params.clone(), capabilities, observer()).err(),
        Incoming::listen(Machine::new(), &at, params.clone(), capabilities, observer()).err(),
    ];
    errors.map(|error| match error {
        Some(StartError::Settings(SettingsError::NotCompiled { cargo_feature, .. })) => cargo_feature,
        other => panic!("not refused: {other:?}"),
    })
}

#[test]
fn setting_whose_feature_is_not_compiled_in_is_refused_on_both_sides_by_its_name() {
    let (params, capabilities) = (Parameters::default(), Capabilities::default());
    let tcp = "tcp:127.0.0.1:0";
    assert_eq!(refused("rdma:127.0.0.1:4444", &params, capabilities), ["rdma"; 2]);
    let compressed = Parameters { multifd_compression: Compression::Zstd, ..params.clone() };
    let multifd = Capabilities { multifd: true, ..capabilities };
    assert_eq!(refused(tcp, &compressed, multifd), ["multifd-compression"; 2]);
    let postcopy = Capabilities { postcopy_ram: true, ..capabilities };
    assert_eq!(refused(tcp, &params, postcopy), ["postcopy"; 2]);
    let again = Parameters { reconnect_window: Duration::from_secs(60), ..params };
    assert_eq!(refused(tcp, &again, capabilities), ["reconnect"; 2]);
}

/// With the feature `tls` of this crate the credentials are missing instead.
#[test]
#[cfg_attr(feature = "tls", ignore = "the engine has TLS")]
fn credentials_are_refused_by_the_name_of_the_feature_of_tls() {
    let refused = Tls::from_directory(Path::new("/nonexistent"), TlsEndpoint::Client).unwrap_err();
    assert!(refused.problem.contains("\"tls\""), "{refused}");
}
