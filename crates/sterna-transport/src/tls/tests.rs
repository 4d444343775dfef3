//! Test: a session whose key has reached its cipher's limit of records, which is small here.

use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::{CipherSuiteCommon, CryptoProvider};
use rustls::{CipherSuite, SupportedCipherSuite, Tls12CipherSuite};

use super::certificates;
use super::provider::provider;
use super::{Tls, TlsCredentials, TlsEndpoint, TlsFault, TlsProblem};
use crate::{CancelFlag, Channel, TransportError};

const LIMIT: Duration = Duration::from_secs(20);

/// TLS 1.2 with AES-GCM and a limit of `records` records per key.
fn with_records(records: u64) -> Arc<CryptoProvider> {
    let all = provider().expect("a provider");
    let wanted = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256;
    let found = all.cipher_suites.iter().find(|suite| suite.suite() == wanted);
    let Some(SupportedCipherSuite::Tls12(suite)) = found else { panic!("no TLS 1.2") };
    let common = CipherSuiteCommon {
        suite: suite.common.suite,
        hash_provider: suite.common.hash_provider,
        confidentiality_limit: records,
    };
    let limited = Tls12CipherSuite {
        common,
        prf_provider: suite.prf_provider,
        kx: suite.kx,
        sign: suite.sign,
        aead_alg: suite.aead_alg,
    };
    let suites = vec![SupportedCipherSuite::Tls12(Box::leak(Box::new(limited)))];
    Arc::new(CryptoProvider { cipher_suites: suites, ..(*all).clone() })
}

#[test]
fn write_of_more_records_than_the_cipher_allows_says_what_to_do_and_blames_nobodys_bytes() {
    let directory = certificates::good_directory();
    let credentials = TlsCredentials::with_ciphers(directory.path(), TlsEndpoint::Client, with_records(40));
    let to = Tls::new(Arc::new(credentials.expect("credentials")));
    let credentials = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Server, true);
    let at = Tls::new(Arc::new(credentials.expect("credentials")));
    let (client, server) = Channel::pair().expect("a pair");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            server.start_tls(&at, TlsEndpoint::Server, None, LIMIT, &CancelFlag::new()).expect("server");
            let mut buffer = [0; 1 << 16];
            while matches!(server.read_some(&mut buffer), Ok(1..)) {}
        });
        client
            .start_tls(&to, TlsEndpoint::Client, Some("localhost"), LIMIT, &CancelFlag::new())
            .expect("client");

        let error = (0..100).find_map(|_| client.write_all(&[7; 1000]).err()).expect("used up");

        let TransportError::Tls { problem, .. } = &error else { panic!("{error}") };
        assert_eq!((problem, problem.fault()), (&TlsProblem::Exhausted, TlsFault::Setup));
        assert!(error.to_string().contains("more channels"), "{error}");
        client.shutdown();
    });
}
