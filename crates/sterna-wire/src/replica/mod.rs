//! Messages between primary and standby of a protected guest, in addition to its state (`specs/replica.md`).
//!
//! They have a separate connection, so that a heartbeat never waits for pages.
//!
//! - [`Hello`] opens the connection, and [`Welcome`] answers.
//! - Each side states its arbiter ([`ArbiterIdentity`]).
//! - Each side then sends [`Message`]s through its [`Session`], which authenticates every message.
//! - [`Output`], [`EpochSection`] and [`CheckpointSummary`] are sections of a Sterna's checkpoints.

mod arbiter;
mod epoch_section;
mod hello;
mod output;
mod session;
mod summary;

pub use arbiter::{ArbiterIdentity, ArbiterStore};
pub use epoch_section::EpochSection;
pub use hello::{Hello, Terms, Welcome};
pub use output::Output;
pub use session::{Message, Role, Session};
pub use summary::{CheckpointSummary, PageSums, SummaryDifference};

const SPEC: &str = "specs/replica.md";
const MAGIC: u32 = 0x5354_4e52;
const VERSION: u32 = 2;
const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();

/// The binding's bytes for the MAC. Empty without TLS, so a connection without TLS never has the MAC of one
/// with TLS.
fn bound(binding: &crate::extension::ChannelBinding) -> Vec<u8> {
    binding.map(|value| value.to_vec()).unwrap_or_default()
}

fn open(r: &mut crate::reader::Reader<'_>) -> Result<(), crate::reader::Stop> {
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
