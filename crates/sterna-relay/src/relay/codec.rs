//! What a new carrier does with the data of flows, by what the relays agreed on.

use std::sync::Arc;

use parking_lot::Mutex;

use super::error::RelayError;
use super::live::Live;
use super::options::Notice;
use super::packing::Codec;
use crate::frame::Offer;
use crate::pack::{Known, Packer, Unpacker};
use crate::session::Role;

/// The codec of a new carrier on which the relays agreed on this. `None`: the peer has the first version.
pub(super) fn codec(live: &Live, agreed: Option<Offer>) -> Result<Codec, RelayError> {
    let compress = &live.options.compress;
    let system = |source| RelayError::System { what: "memory for compression", source };
    let mut state = live.lock();
    let Some(Offer { packs: true, cache_pages }) = agreed else {
        if live.role == Role::Dialer && compress.is_on() && !state.packing.has_complained {
            state.packing.has_complained = true;
            let why = match agreed {
                None => "the other relay is older and cannot read it",
                Some(_) => "the other relay does not accept it (--compress off)",
            };
            live.options.notices.send(Notice::NotCompressed { session: live.id, why });
        }
        return Ok(Codec::default());
    };
    state.session.agree();
    match live.role {
        Role::Dialer => {
            let own = compress.cache.most_pages();
            let packing = &mut state.packing;
            let known =
                packing.known.get_or_insert_with(|| Arc::new(Mutex::new(Known::new(cache_pages, own))));
            packing.carriers += 1;
            let packer = Packer::new(compress.mode, packing.carriers, Arc::clone(known)).map_err(system)?;
            Ok(Codec { packer: Some(packer), unpacker: None })
        }
        Role::Acceptor => {
            if !std::mem::replace(&mut state.packing.has_announced, true) {
                let (lasting, kept) = compress.cache.announcement();
                state.session.announce(true, &lasting);
                state.session.announce(false, &kept);
            }
            let unpacker = Unpacker::new(Arc::clone(&compress.cache)).map_err(system)?;
            Ok(Codec { packer: None, unpacker: Some(unpacker) })
        }
    }
}
