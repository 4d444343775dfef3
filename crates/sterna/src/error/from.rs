//! Causes become errors without the name of their area.

use super::{
    BadAnswer, BadGrant, BadMemory, BadPackage, BadPage, BadRound, ConfigurationDifference,
    MachineDifference, MemoryDifference, MigrationError, ProtectionDifference, SettingDifference, Untimely,
};

macro_rules! becomes {
    ($variant:ident: $($area:ty),*) => {
        $(impl From<$area> for MigrationError {
            fn from(why: $area) -> Self {
                Self::$variant(why.into())
            }
        })*
    };
}

becomes!(PeerMisbehaved: BadPage, BadRound, Untimely, BadPackage, BadAnswer, BadGrant, BadMemory);
#[cfg(feature = "standby")]
becomes!(PeerMisbehaved: super::BadProtection);
becomes!(PeerIncompatible: ConfigurationDifference, SettingDifference, MachineDifference, MemoryDifference, ProtectionDifference);
#[cfg(feature = "rdma")]
becomes!(PeerIncompatible: super::RdmaDifference);
