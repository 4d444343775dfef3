//! The compressed streams: zlib and zstd.

mod zlib;
mod zstd;

use std::sync::Arc;

use super::{Decoder, Encoder};
use crate::error::{BadPayload, MigrationError, Misbehaviour};
use crate::params::{Compression, Parameters};

pub(super) fn encoder(params: &Parameters) -> Result<Option<Box<dyn Encoder>>, MigrationError> {
    Ok(match params.multifd_compression {
        Compression::None => None,
        Compression::Zlib => Some(Box::new(zlib::ZlibEncoder::new(params.multifd_zlib_level))),
        Compression::Zstd => Some(Box::new(zstd::ZstdEncoder::new(params.multifd_zstd_level)?)),
    })
}

pub(super) fn decoder(compression: Compression) -> Result<Option<Box<dyn Decoder>>, MigrationError> {
    Ok(match compression {
        Compression::None => None,
        Compression::Zlib => Some(Box::new(zlib::ZlibDecoder::new())),
        Compression::Zstd => Some(Box::new(zstd::ZstdDecoder::new()?)),
    })
}

fn bad(codec: &'static str, why: BadPayload) -> MigrationError {
    Misbehaviour::Payload { codec, why }.into()
}

fn corrupt(codec: &'static str, why: impl std::error::Error + Send + Sync + 'static) -> MigrationError {
    bad(codec, BadPayload::Corrupt(Arc::new(why)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decoder, encoder};
    use sterna_ram::PAGE_SIZE;

    fn pair(compression: Compression) -> (Box<dyn Encoder>, Box<dyn Decoder>) {
        let params = Parameters { multifd_compression: compression, ..Parameters::default() };
        (encoder(&params).unwrap().unwrap(), decoder(compression).unwrap().unwrap())
    }

    /// Random pages, half noise and half text, so that payloads shrink but stay large.
    fn pages(seed: u64, count: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..count * PAGE_SIZE).map(|i| if i % 2 == 0 { random.u8(..) } else { (i / 64) as u8 }).collect()
    }

    #[test]
    fn payloads_in_a_row_round_trip_through_one_stream() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let (mut encoder, mut decoder) = pair(compression);
            for (seed, count) in [(1, 1), (2, 128), (3, 7), (4, 128)] {
                let original = pages(seed, count);
                let mut payload = Vec::new();
                encoder.encode(&original, &mut payload).unwrap();
                let mut copy = vec![0; original.len()];
                decoder.decode(&payload, &mut copy).unwrap();
                assert!(copy == original, "{compression:?}, {count} pages");
            }
        }
    }

    #[test]
    fn payload_of_another_length_is_refused() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            for wanted in [PAGE_SIZE, 3 * PAGE_SIZE] {
                let (mut encoder, mut decoder) = pair(compression);
                let mut payload = Vec::new();
                encoder.encode(&pages(5, 2), &mut payload).unwrap();
                let error = decoder.decode(&payload, &mut vec![0; wanted]).unwrap_err();
                assert!(
                    matches!(error, MigrationError::PeerMisbehaved(Misbehaviour::Payload { .. })),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn garbled_payload_is_refused_or_differs() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let original = pages(6, 4);
            let (mut encoder, _) = pair(compression);
            let mut payload = Vec::new();
            encoder.encode(&original, &mut payload).unwrap();
            for at in (0..payload.len()).step_by(97) {
                let mut bad = payload.clone();
                bad[at] ^= 0x55;
                let mut copy = vec![0; original.len()];
                let mut decoder = decoder(compression).unwrap().unwrap();
                // Neither format has a checksum here, so damaged input may decode to wrong bytes. It must not panic.
                let _ = decoder.decode(&bad, &mut copy);
            }
        }
    }
}
