//! A VMM that uses rustls with ring, in one process with the engine's TLS.
//!
//! `cargo test --manifest-path testing/embedder/Cargo.toml --features tls --test providers`, and the same with
//! `--features two-providers`.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::crypto::{CryptoProvider, ring};
use sterna::{
    Capabilities, Incoming, Migration, Outcome, Parameters, Tls, TlsCredentials, TlsEndpoint, TlsFiles,
};
use sterna_embedder::Machine;

/// A directory with an authority, and both sides' certificates and keys.
fn certificates() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(directory.path().join(name), text).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, "authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    write("ca-cert.pem", params.self_signed(&key).unwrap().pem());
    let issuer = Issuer::new(params, key);
    let sides =
        [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)];
    for (side, purpose) in sides {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().unwrap();
        write(&format!("{side}-cert.pem"), params.signed_by(&key, &issuer).unwrap().pem());
        write(&format!("{side}-key.pem"), key.serialize_pem());
    }
    directory
}

fn credentials(directory: &Path, endpoint: TlsEndpoint) -> Tls {
    let files = TlsFiles::in_directory(directory, endpoint);
    let provider = Arc::new(ring::default_provider());
    let credentials = TlsCredentials::load_with_provider(&files, endpoint, true, provider);
    Tls::new(Arc::new(credentials.expect("credentials")))
}

fn migrate(tls: impl Fn(TlsEndpoint) -> Tls) {
    let (source, target) = (Machine::with_guest(), Machine::new());
    let capabilities = Capabilities { multifd: true, ..Capabilities::default() };
    let params = |endpoint| Parameters { tls: Some(tls(endpoint)), ..Parameters::default() };
    let at = "tcp:localhost:0".parse().unwrap();
    let listening =
        Incoming::listen(target.clone(), &at, params(TlsEndpoint::Server), capabilities, Arc::new(()));
    let incoming = listening.unwrap();
    let to = incoming.address();
    let migration =
        Migration::start(source.clone(), &to, params(TlsEndpoint::Client), capabilities, Arc::new(()));
    let outcome = migration.unwrap().wait();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(source.content() == target.content(), "memory differs");
}

/// One test, because rustls's choice for `builder` is the process's default from then on.
#[test]
fn engine_uses_the_provider_that_it_is_handed_and_leaves_the_default_to_the_vmm() {
    let directory = certificates();
    migrate(|endpoint| credentials(directory.path(), endpoint));
    assert!(CryptoProvider::get_default().is_none(), "the engine installed a default");

    // With one provider in the graph rustls chooses it by itself, as without the engine. Of two it chooses none.
    if cfg!(not(feature = "two-providers")) {
        let builder = rustls::ClientConfig::builder();
        let suites = builder.crypto_provider().cipher_suites.len();
        assert_eq!(suites, ring::default_provider().cipher_suites.len());
    }
}

#[test]
fn credentials_without_a_provider_are_refused_by_the_names_of_the_features() {
    let directory = certificates();
    let loaded = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Client, true);
    match cfg!(feature = "two-providers") {
        true => drop(loaded.expect("aws-lc-rs is compiled in")),
        false => {
            let refused = loaded.unwrap_err();
            assert!(refused.problem.contains("\"aws-lc-rs\" or \"ring\""), "{refused}");
        }
    }
}

/// The engine names its provider explicitly, so that two of them are no ambiguity.
#[test]
#[cfg_attr(not(feature = "two-providers"), ignore = "needs the engine's feature aws-lc-rs")]
fn engine_with_aws_lc_rs_beside_a_vmm_with_ring_migrates() {
    let directory = certificates();
    migrate(|endpoint| Tls::from_directory(directory.path(), endpoint).expect("credentials"));
}
