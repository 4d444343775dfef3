//! Serialises a value with each [`Duration`](std::time::Duration) in it as a number of seconds.
//! Serde's own form is an object of seconds and nanoseconds. Durations are recognised by their type, so no
//! field needs an annotation.

use serde::ser::{
    SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant,
};
use serde::{Serialize, Serializer};

/// The function for `#[serde(serialize_with)]`.
pub fn serialize<T: Serialize, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    value.serialize(Seconds(to))
}

/// A serializer that writes durations as seconds to the wrapped serializer.
struct Seconds<S>(S);
/// A value inside another one. Its durations become seconds, too.
struct Inner<'a, T: ?Sized>(&'a T);
/// A value of several parts, such as a sequence or a map.
struct Parts<P>(P);
/// A struct, which may be a duration.
enum Fields<S: Serializer> {
    Struct(S::SerializeStruct),
    Duration { to: S, seconds: f64 },
}

impl<T: Serialize + ?Sized> Serialize for Inner<'_, T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(Seconds(to))
    }
}

impl<S: Serializer> SerializeStruct for Fields<S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        key: &'static str,
        value: &T,
    ) -> Result<(), S::Error> {
        match self {
            Self::Struct(fields) => fields.serialize_field(key, &Inner(value)),
            Self::Duration { seconds, .. } => {
                let number = serde_json::to_value(value).map_err(serde::ser::Error::custom)?;
                let per_second = if key == "nanos" { 1e9 } else { 1.0 };
                *seconds += number.as_f64().unwrap_or_default() / per_second;
                Ok(())
            }
        }
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        match self {
            Self::Struct(fields) => fields.end(),
            // Rounded to the nearest whole nanosecond, so that a value is equal after it is written and read.
            Self::Duration { to, seconds } => to.serialize_f64((seconds * 1e9).round() / 1e9),
        }
    }
}

/// Forwards values without parts unchanged.
macro_rules! forward {
    ($($method:ident($($name:ident: $kind:ty),*)),* $(,)?) => {
        $(fn $method(self, $($name: $kind),*) -> Result<S::Ok, S::Error> { self.0.$method($($name),*) })*
    };
}

impl<S: Serializer> Serializer for Seconds<S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Parts<S::SerializeSeq>;
    type SerializeTuple = Parts<S::SerializeTuple>;
    type SerializeTupleStruct = Parts<S::SerializeTupleStruct>;
    type SerializeTupleVariant = Parts<S::SerializeTupleVariant>;
    type SerializeMap = Parts<S::SerializeMap>;
    type SerializeStruct = Fields<S>;
    type SerializeStructVariant = Parts<S::SerializeStructVariant>;

    forward! {
        serialize_bool(value: bool), serialize_i8(value: i8), serialize_i16(value: i16), serialize_i32(value: i32),
        serialize_i64(value: i64), serialize_u8(value: u8), serialize_u16(value: u16), serialize_u32(value: u32),
        serialize_u64(value: u64), serialize_f32(value: f32), serialize_f64(value: f64), serialize_char(value: char),
        serialize_str(value: &str), serialize_bytes(value: &[u8]), serialize_none(), serialize_unit(),
        serialize_unit_struct(name: &'static str),
        serialize_unit_variant(name: &'static str, index: u32, variant: &'static str),
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.0.serialize_some(&Inner(value))
    }
    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.0.serialize_newtype_struct(name, &Inner(value))
    }
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.0.serialize_newtype_variant(name, index, variant, &Inner(value))
    }
    fn serialize_seq(self, len: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        self.0.serialize_seq(len).map(Parts)
    }
    fn serialize_tuple(self, len: usize) -> Result<Self::SerializeTuple, S::Error> {
        self.0.serialize_tuple(len).map(Parts)
    }
    fn serialize_tuple_struct(
        self,
        name: &'static str,
        len: usize,
    ) -> Result<Self::SerializeTupleStruct, S::Error> {
        self.0.serialize_tuple_struct(name, len).map(Parts)
    }
    fn serialize_tuple_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        self.0.serialize_tuple_variant(name, index, variant, len).map(Parts)
    }
    fn serialize_map(self, len: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        self.0.serialize_map(len).map(Parts)
    }
    fn serialize_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeStruct, S::Error> {
        match name {
            "Duration" => Ok(Fields::Duration { to: self.0, seconds: 0.0 }),
            _ => self.0.serialize_struct(name, len).map(Fields::Struct),
        }
    }
    fn serialize_struct_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        self.0.serialize_struct_variant(name, index, variant, len).map(Parts)
    }
}

/// Values of several parts: each part is written with its durations as seconds.
macro_rules! parts {
    ($($of:ident::$method:ident($($key:ident: $kind:ty)?)),* $(,)?) => {
        $(impl<P: $of> $of for Parts<P> {
            type Ok = P::Ok;
            type Error = P::Error;
            fn $method<T: Serialize + ?Sized>(&mut self, $($key: $kind,)? value: &T) -> Result<(), P::Error> {
                self.0.$method($($key,)? &Inner(value))
            }
            fn end(self) -> Result<P::Ok, P::Error> {
                self.0.end()
            }
        })*
    };
}

parts! {
    SerializeSeq::serialize_element(),
    SerializeTuple::serialize_element(),
    SerializeTupleStruct::serialize_field(),
    SerializeTupleVariant::serialize_field(),
    SerializeStructVariant::serialize_field(key: &'static str),
}

impl<P: SerializeMap> SerializeMap for Parts<P> {
    type Ok = P::Ok;
    type Error = P::Error;
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), P::Error> {
        self.0.serialize_key(key)
    }
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), P::Error> {
        self.0.serialize_value(&Inner(value))
    }
    fn end(self) -> Result<P::Ok, P::Error> {
        self.0.end()
    }
}
