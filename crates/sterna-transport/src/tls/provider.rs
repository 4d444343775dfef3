//! The cryptographic library of TLS: aws-lc-rs or ring, by features of the crate.
//!
//! It is handed to rustls explicitly. The process's default provider belongs to the embedder.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// The ciphers, with 128-bit AES first. It is safe enough for this use, and a quarter faster.
///
/// `None` if the crate was built without a library.
pub(super) fn provider() -> Option<Arc<CryptoProvider>> {
    let mut provider = library()?;
    provider.cipher_suites.sort_by_key(|suite| {
        let fast = suite.suite() == rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
        (suite.tls13().is_none(), !fast)
    });
    Some(Arc::new(provider))
}

#[cfg(feature = "aws-lc-rs")]
fn library() -> Option<CryptoProvider> {
    Some(rustls::crypto::aws_lc_rs::default_provider())
}

#[cfg(all(feature = "ring", not(feature = "aws-lc-rs")))]
fn library() -> Option<CryptoProvider> {
    Some(rustls::crypto::ring::default_provider())
}

#[cfg(not(any(feature = "aws-lc-rs", feature = "ring")))]
fn library() -> Option<CryptoProvider> {
    None
}
