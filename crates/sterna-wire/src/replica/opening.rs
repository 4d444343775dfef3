//! The words that begin a connection, and the bytes that bind it to its TLS session.

pub(super) const SPEC: &str = "specs/replica.md";
pub(super) const MAGIC: u32 = 0x5354_4e52;
pub(super) const VERSION: u32 = 2;
pub(super) const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();

/// The binding's bytes for the MAC. Empty without TLS, so a connection without TLS never has the MAC of one
/// with TLS.
pub(super) fn bound(binding: &crate::extension::ChannelBinding) -> Vec<u8> {
    binding.map(|value| value.to_vec()).unwrap_or_default()
}

pub(super) fn open(r: &mut crate::reader::Reader<'_>) -> Result<(), crate::reader::Stop> {
    if r.u32()? != MAGIC {
        return Err(r.bad(SPEC, "the magic is not \"STNR\""));
    }
    let version = r.u32()?;
    if version != VERSION {
        let rule = format!("version {version}, only {VERSION} is known: run the same Sterna on both sides");
        return Err(r.unfit(SPEC, rule));
    }
    Ok(())
}
