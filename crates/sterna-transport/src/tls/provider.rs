//! The cryptography library of TLS: aws-lc-rs, or ring, by a feature of the crate.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

#[cfg(all(feature = "ring", not(feature = "aws-lc-rs")))]
use rustls::crypto::ring as library;

#[cfg(feature = "aws-lc-rs")]
use rustls::crypto::aws_lc_rs as library;

#[cfg(not(any(feature = "aws-lc-rs", feature = "ring")))]
compile_error!("TLS needs one of the features aws-lc-rs and ring");

/// The ciphers, with 128-bit AES first. It is safe enough for this use, and a quarter faster.
pub(super) fn provider() -> Arc<CryptoProvider> {
    let mut provider = library::default_provider();
    provider.cipher_suites.sort_by_key(|suite| {
        let fast = suite.suite() == rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
        (suite.tls13().is_none(), !fast)
    });
    Arc::new(provider)
}
