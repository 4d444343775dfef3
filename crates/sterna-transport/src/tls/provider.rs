//! Which library does the arithmetic: aws-lc-rs, or ring.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

#[cfg(all(feature = "ring", not(feature = "aws-lc-rs")))]
use rustls::crypto::ring as library;

#[cfg(feature = "aws-lc-rs")]
use rustls::crypto::aws_lc_rs as library;

#[cfg(not(any(feature = "aws-lc-rs", feature = "ring")))]
compile_error!("TLS needs one of the features aws-lc-rs and ring");

/// AES with 128 bits first: as safe for this, and a quarter faster.
pub(super) fn provider() -> Arc<CryptoProvider> {
    let mut provider = library::default_provider();
    provider.cipher_suites.sort_by_key(|suite| {
        let fast = suite.suite() == rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
        (suite.tls13().is_none(), !fast)
    });
    Arc::new(provider)
}
