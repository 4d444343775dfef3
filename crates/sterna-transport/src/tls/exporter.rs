//! Channel binding: a value that identifies a TLS session at both ends (`tls-exporter` of RFC 9266).
//!
//! rustls computes exporters, but not in its interface without buffers, which channels use. This file therefore
//! takes the exporter secret from the session's key log during the handshake, and derives the value itself (RFC
//! 8446 §7.5). Nothing is logged.

use std::fmt;

use parking_lot::Mutex;
use rustls::crypto::tls13::{HkdfExpander, OkmBlock};
use rustls::{CommonState, KeyLog, SupportedCipherSuite};

/// Exporter label of RFC 9266 §2.
const LABEL: &[u8] = b"EXPORTER-Channel-Binding";
/// rustls's name of the exporter secret in the key log. TLS 1.2 has no such secret.
const SECRET: &str = "EXPORTER_SECRET";

/// Stores the exporter secret of one session.
#[derive(Default)]
pub(super) struct Exporter(Mutex<Option<OkmBlock>>);

impl KeyLog for Exporter {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if label == SECRET && secret.len() <= OkmBlock::MAX_LEN {
            *self.0.lock() = Some(OkmBlock::new(secret));
        }
    }

    fn will_log(&self, label: &str) -> bool {
        label == SECRET
    }
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Exporter(..)")
    }
}

impl Exporter {
    /// The binding of a session after its handshake; erases the secret.
    ///
    /// `None` for TLS 1.2, whose value is not always unique.
    pub(crate) fn channel_binding(&self, session: &CommonState) -> Option<[u8; 32]> {
        let secret = self.0.lock().take()?;
        let Some(SupportedCipherSuite::Tls13(suite)) = session.negotiated_cipher_suite() else { return None };
        let empty = suite.common.hash_provider.start().finish();
        // Derive-Secret(exporter secret, label, ""), then the label "exporter" with an empty context.
        let mut derived = vec![0; empty.as_ref().len()];
        expand(suite.hkdf_provider.expander_for_okm(&secret).as_ref(), LABEL, empty.as_ref(), &mut derived)?;
        let derived = OkmBlock::new(&derived);
        let mut value = [0; 32];
        let expander = suite.hkdf_provider.expander_for_okm(&derived);
        expand(expander.as_ref(), b"exporter", empty.as_ref(), &mut value)?;
        Some(value)
    }
}

/// Derives `out` from `key` by HKDF-Expand-Label (RFC 8446 §7.1).
fn expand(key: &dyn HkdfExpander, label: &[u8], context: &[u8], out: &mut [u8]) -> Option<()> {
    const PREFIX: &[u8] = b"tls13 ";
    let bytes = u16::try_from(out.len()).ok()?.to_be_bytes();
    let label_bytes = [u8::try_from(PREFIX.len() + label.len()).ok()?];
    let context_bytes = [u8::try_from(context.len()).ok()?];
    let info: [&[u8]; 6] = [&bytes, &label_bytes, PREFIX, label, &context_bytes, context];
    key.expand_slice(&info, out).ok()
}
