module @IrToHlo.2626 attributes {mhlo.cross_program_prefetches = [], mhlo.input_output_alias = [], mhlo.is_dynamic = false, mhlo.use_auto_spmd_partitioning = false} {
  func.func @main(%arg0: tensor<f32>, %arg1: tensor<f32>, %arg2: tensor<2xf32>, %arg3: tensor<f64>, %arg4: tensor<f32>, %arg5: tensor<f32>, %arg6: tensor<1x197x384xf32>, %arg7: tensor<384xf32>, %arg8: tensor<384x3x16x16xf32>, %arg9: tensor<1x3x1x1xf32>, %arg10: tensor<1x3x1x1xf32>, %arg11: tensor<8x224x224x3xui8>, %arg12: tensor<1x1x384xf32>, %arg13: tensor<384xf32>, %arg14: tensor<1152x384xf32>, %arg15: tensor<f32>, %arg16: tensor<1152xf32>, %arg17: tensor<384xf32>, %arg18: tensor<384x384xf32>, %arg19: tensor<384xf32>, %arg20: tensor<384xf32>, %arg21: tensor<1536x384xf32>, %arg22: tensor<f32>, %arg23: tensor<f32>, %arg24: tensor<f32>, %arg25: tensor<f32>, %arg26: tensor<f32>, %arg27: tensor<1536xf32>, %arg28: tensor<384xf32>, %arg29: tensor<f32>, %arg30: tensor<f32>, %arg31: tensor<f32>, %arg32: tensor<384x1536xf32>, %arg33: tensor<384xf32>, %arg34: tensor<384xf32>, %arg35: tensor<1000x384xf32>, %arg36: tensor<1000xf32>, %arg37: tensor<384xf32>, %arg38: tensor<8xi32>, %arg39: tensor<i64>, %arg40: tensor<8xi1>, %arg41: tensor<f32>, %arg42: tensor<1x1x384xf32>, %arg43: tensor<f32>, %arg44: tensor<1x1x384xf32>, %arg45: tensor<f32>, %arg46: tensor<1x197x384xf32>, %arg47: tensor<1x197x384xf32>, %arg48: tensor<f32>, %arg49: tensor<384x3x16x16xf32>, %arg50: tensor<384x3x16x16xf32>, %arg51: tensor<f32>, %arg52: tensor<f32>, %arg53: tensor<384xf32>, %arg54: tensor<384xf32>, %arg55: tensor<f32>, %arg56: tensor<384xf32>, %arg57: tensor<384xf32>, %arg58: tensor<f32>, %arg59: tensor<384xf32>, %arg60: tensor<384xf32>, %arg61: tensor<f32>, %arg62: tensor<1152x384xf32>, %arg63: tensor<1152x384xf32>, %arg64: tensor<f32>, %arg65: tensor<1152xf32>, %arg66: tensor<1152xf32>, %arg67: tensor<f32>, %arg68: tensor<384x384xf32>, %arg69: tensor<384x384xf32>, %arg70: tensor<f32>, %arg71: tensor<384xf32>, %arg72: tensor<384xf32>, %arg73: tensor<f32>, %arg74: tensor<384xf32>, %arg75: tensor<384xf32>, %arg76: tensor<f32>, %arg77: tensor<384xf32>, %arg78: tensor<384xf32>, %arg79: tensor<f32>, %arg80: tensor<1536x384xf32>, %arg81: tensor<1536x384xf32>, %arg82: tensor<f32>, %arg83: tensor<1536xf32>, %arg84: tensor<1536xf32>, %arg85: tensor<f32>, %arg86: tensor<384x1536xf32>, %arg87: tensor<384x1536xf32>, %arg88: tensor<f32>, %arg89: tensor<384xf32>, %arg90: tensor<384xf32>, %arg91: tensor<f32>, %arg92: tensor<384xf32>, %arg93: tensor<384xf32>, %arg94: tensor<f32>, %arg95: tensor<384xf32>, %arg96: tensor<384xf32>, %arg97: tensor<f32>, %arg98: tensor<1000x384xf32>, %arg99: tensor<1000x384xf32>, %arg100: tensor<f32>, %arg101: tensor<1000xf32>, %arg102: tensor<1000xf32>, %arg103: tensor<f32>, %arg104: tensor<1xf32>, %arg105: tensor<f64>) -> (tensor<1x1x384xf32>, tensor<1x197x384xf32>, tensor<384x3x16x16xf32>, tensor<384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<1152x384xf32>, tensor<1152xf32>, tensor<384x384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<1536x384xf32>, tensor<1536xf32>, tensor<384x1536xf32>, tensor<384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<1000x384xf32>, tensor<1000xf32>, tensor<f32>, tensor<1x1x384xf32>, tensor<1x1x384xf32>, tensor<f32>, tensor<1x197x384xf32>, tensor<1x197x384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<1152xf32>, tensor<1152xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<1536xf32>, tensor<1536xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<1000xf32>, tensor<1000xf32>, tensor<f32>, tensor<384x3x16x16xf32>, tensor<384x3x16x16xf32>, tensor<f32>, tensor<1152x384xf32>, tensor<1152x384xf32>, tensor<f32>, tensor<384x384xf32>, tensor<384x384xf32>, tensor<f32>, tensor<1536x384xf32>, tensor<1536x384xf32>, tensor<f32>, tensor<384x1536xf32>, tensor<384x1536xf32>, tensor<f32>, tensor<1000x384xf32>, tensor<1000x384xf32>, tensor<f32>, tensor<1x3x1x1xf32>, tensor<1x3x1x1xf32>, tensor<4xf32>) {
    %cst = stablehlo.constant dense<2.000000e+00> : tensor<20xf32>
    %cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<1000xf32>
    %cst_1 = stablehlo.constant dense<2.000000e+00> : tensor<1000x384xf32>
    %cst_2 = stablehlo.constant dense<2.000000e+00> : tensor<384x1536xf32>
    %cst_3 = stablehlo.constant dense<2.000000e+00> : tensor<1536xf32>
    %cst_4 = stablehlo.constant dense<2.000000e+00> : tensor<1536x384xf32>
    %cst_5 = stablehlo.constant dense<2.000000e+00> : tensor<384x384xf32>
    %cst_6 = stablehlo.constant dense<2.000000e+00> : tensor<1152xf32>
    %cst_7 = stablehlo.constant dense<2.000000e+00> : tensor<1152x384xf32>
    %cst_8 = stablehlo.constant dense<2.000000e+00> : tensor<384xf32>
    %cst_9 = stablehlo.constant dense<2.000000e+00> : tensor<384x3x16x16xf32>
    %cst_10 = stablehlo.constant dense<2.000000e+00> : tensor<1x197x384xf32>
    %cst_11 = stablehlo.constant dense<2.000000e+00> : tensor<1x1x384xf32>
    %cst_12 = stablehlo.constant dense<1.000000e+00> : tensor<64x8xbf16>
    %cst_13 = stablehlo.constant dense<1.000000e+00> : tensor<8x197x1536xf32>
    %cst_14 = stablehlo.constant dense<0.000000e+00> : tensor<8x1x1xf32>
    %cst_15 = stablehlo.constant dense<0.00260416674> : tensor<8x1xf32>
    %cst_16 = stablehlo.constant dense<"0x0000803F00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"> : tensor<197xf32>
    %cst_17 = stablehlo.constant dense<1.000000e+00> : tensor<8x6x1x197xf32>
    %cst_18 = stablehlo.constant dense<0.000000e+00> : tensor<8x197x1xf32>
    %cst_19 = stablehlo.constant dense<0.00260416674> : tensor<8x197xf32>
    %cst_20 = stablehlo.constant dense<0.000000e+00> : tensor<8xf32>
    %c = stablehlo.constant dense<0> : tensor<ui8>
    %c_21 = stablehlo.constant dense<false> : tensor<i1>
    %c_22 = stablehlo.constant dense<true> : tensor<i1>
    %cst_23 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %cst_24 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %cst_25 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %cst_26 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_27 = stablehlo.constant dense<0xFF80> : tensor<bf16>
    %c_28 = stablehlo.constant dense<"0x000000000100000002000000030000000400000005000000060000000700000008000000090000000A0000000B0000000C0000000D0000000E0000000F000000100000001100000012000000130000001400000015000000160000001700000018000000190000001A0000001B0000001C0000001D0000001E0000001F000000200000002100000022000000230000002400000025000000260000002700000028000000290000002A0000002B0000002C0000002D0000002E0000002F000000300000003100000032000000330000003400000035000000360000003700000038000000390000003A0000003B0000003C0000003D0000003E0000003F000000400000004100000042000000430000004400000045000000460000004700000048000000490000004A0000004B0000004C0000004D0000004E0000004F000000500000005100000052000000530000005400000055000000560000005700000058000000590000005A0000005B0000005C0000005D0000005E0000005F000000600000006100000062000000630000006400000065000000660000006700000068000000690000006A0000006B0000006C0000006D0000006E0000006F000000700000007100000072000000730000007400000075000000760000007700000078000000790000007A0000007B0000007C0000007D0000007E0000007F000000800000008100000082000000830000008400000085000000860000008700000088000000890000008A0000008B0000008C0000008D0000008E0000008F000000900000009100000092000000930000009400000095000000960000009700000098000000990000009A0000009B0000009C0000009D0000009E0000009F000000A0000000A1000000A2000000A3000000A4000000A5000000A6000000A7000000A8000000A9000000AA000000AB000000AC000000AD000000AE000000AF000000B0000000B1000000B2000000B3000000B4000000B5000000B6000000B7000000B8000000B9000000BA000000BB000000BC000000BD000000BE000000BF000000C0000000C1000000C2000000C3000000C4000000C5000000C6000000C7000000C8000000C9000000CA000000CB000000CC000000CD000000CE000000CF000000D0000000D1000000D2000000D3000000D4000000D5000000D6000000D7000000D8000000D9000000DA000000DB000000DC000000DD000000DE000000DF000000E0000000E1000000E2000000E3000000E4000000E5000000E6000000E7000000E8000000E9000000EA000000EB000000EC000000ED000000EE000000EF000000F0000000F1000000F2000000F3000000F4000000F5000000F6000000F7000000F8000000F9000000FA000000FB000000FC000000FD000000FE000000FF000000000100000101000002010000030100000401000005010000060100000701000008010000090100000A0100000B0100000C0100000D0100000E0100000F010000100100001101000012010000130100001401000015010000160100001701000018010000190100001A0100001B0100001C0100001D0100001E0100001F010000200100002101000022010000230100002401000025010000260100002701000028010000290100002A0100002B0100002C0100002D0100002E0100002F010000300100003101000032010000330100003401000035010000360100003701000038010000390100003A0100003B0100003C0100003D0100003E0100003F010000400100004101000042010000430100004401000045010000460100004701000048010000490100004A0100004B0100004C0100004D0100004E0100004F010000500100005101000052010000530100005401000055010000560100005701000058010000590100005A0100005B0100005C0100005D0100005E0100005F010000600100006101000062010000630100006401000065010000660100006701000068010000690100006A0100006B0100006C0100006D0100006E0100006F010000700100007101000072010000730100007401000075010000760100007701000078010000790100007A0100007B0100007C0100007D0100007E0100007F010000800100008101000082010000830100008401000085010000860100008701000088010000890100008A0100008B0100008C0100008D0100008E0100008F010000900100009101000092010000930100009401000095010000960100009701000098010000990100009A0100009B0100009C0100009D0100009E0100009F010000A0010000A1010000A2010000A3010000A4010000A5010000A6010000A7010000A8010000A9010000AA010000AB010000AC010000AD010000AE010000AF010000B0010000B1010000B2010000B3010000B4010000B5010000B6010000B7010000B8010000B9010000BA010000BB010000BC010000BD010000BE010000BF010000C0010000C1010000C2010000C3010000C4010000C5010000C6010000C7010000C8010000C9010000CA010000CB010000CC010000CD010000CE010000CF010000D0010000D1010000D2010000D3010000D4010000D5010000D6010000D7010000D8010000D9010000DA010000DB010000DC010000DD010000DE010000DF010000E0010000E1010000E2010000E3010000E4010000E5010000E6010000E7010000E8010000E9010000EA010000EB010000EC010000ED010000EE010000EF010000F0010000F1010000F2010000F3010000F4010000F5010000F6010000F7010000F8010000F9010000FA010000FB010000FC010000FD010000FE010000FF010000000200000102000002020000030200000402000005020000060200000702000008020000090200000A0200000B0200000C0200000D0200000E0200000F020000100200001102000012020000130200001402000015020000160200001702000018020000190200001A0200001B0200001C0200001D0200001E0200001F020000200200002102000022020000230200002402000025020000260200002702000028020000290200002A0200002B0200002C0200002D0200002E0200002F020000300200003102000032020000330200003402000035020000360200003702000038020000390200003A0200003B0200003C0200003D0200003E0200003F020000400200004102000042020000430200004402000045020000460200004702000048020000490200004A0200004B0200004C0200004D0200004E0200004F020000500200005102000052020000530200005402000055020000560200005702000058020000590200005A0200005B0200005C0200005D0200005E0200005F020000600200006102000062020000630200006402000065020000660200006702000068020000690200006A0200006B0200006C0200006D0200006E0200006F020000700200007102000072020000730200007402000075020000760200007702000078020000790200007A0200007B0200007C0200007D0200007E0200007F020000800200008102000082020000830200008402000085020000860200008702000088020000890200008A0200008B0200008C0200008D0200008E0200008F020000900200009102000092020000930200009402000095020000960200009702000098020000990200009A0200009B0200009C0200009D0200009E0200009F020000A0020000A1020000A2020000A3020000A4020000A5020000A6020000A7020000A8020000A9020000AA020000AB020000AC020000AD020000AE020000AF020000B0020000B1020000B2020000B3020000B4020000B5020000B6020000B7020000B8020000B9020000BA020000BB020000BC020000BD020000BE020000BF020000C0020000C1020000C2020000C3020000C4020000C5020000C6020000C7020000C8020000C9020000CA020000CB020000CC020000CD020000CE020000CF020000D0020000D1020000D2020000D3020000D4020000D5020000D6020000D7020000D8020000D9020000DA020000DB020000DC020000DD020000DE020000DF020000E0020000E1020000E2020000E3020000E4020000E5020000E6020000E7020000E8020000E9020000EA020000EB020000EC020000ED020000EE020000EF020000F0020000F1020000F2020000F3020000F4020000F5020000F6020000F7020000F8020000F9020000FA020000FB020000FC020000FD020000FE020000FF020000000300000103000002030000030300000403000005030000060300000703000008030000090300000A0300000B0300000C0300000D0300000E0300000F030000100300001103000012030000130300001403000015030000160300001703000018030000190300001A0300001B0300001C0300001D0300001E0300001F030000200300002103000022030000230300002403000025030000260300002703000028030000290300002A0300002B0300002C0300002D0300002E0300002F030000300300003103000032030000330300003403000035030000360300003703000038030000390300003A0300003B0300003C0300003D0300003E0300003F030000400300004103000042030000430300004403000045030000460300004703000048030000490300004A0300004B0300004C0300004D0300004E0300004F030000500300005103000052030000530300005403000055030000560300005703000058030000590300005A0300005B0300005C0300005D0300005E0300005F030000600300006103000062030000630300006403000065030000660300006703000068030000690300006A0300006B0300006C0300006D0300006E0300006F030000700300007103000072030000730300007403000075030000760300007703000078030000790300007A0300007B0300007C0300007D0300007E0300007F030000800300008103000082030000830300008403000085030000860300008703000088030000890300008A0300008B0300008C0300008D0300008E0300008F030000900300009103000092030000930300009403000095030000960300009703000098030000990300009A0300009B0300009C0300009D0300009E0300009F030000A0030000A1030000A2030000A3030000A4030000A5030000A6030000A7030000A8030000A9030000AA030000AB030000AC030000AD030000AE030000AF030000B0030000B1030000B2030000B3030000B4030000B5030000B6030000B7030000B8030000B9030000BA030000BB030000BC030000BD030000BE030000BF030000C0030000C1030000C2030000C3030000C4030000C5030000C6030000C7030000C8030000C9030000CA030000CB030000CC030000CD030000CE030000CF030000D0030000D1030000D2030000D3030000D4030000D5030000D6030000D7030000D8030000D9030000DA030000DB030000DC030000DD030000DE030000DF030000E0030000E1030000E2030000E3030000E4030000E5030000E6030000E7030000"> : tensor<1000xi32>
    %cst_29 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %c_30 = stablehlo.constant dense<0> : tensor<i64>
    %c_31 = stablehlo.constant dense<1> : tensor<i64>
    %cst_32 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_33 = stablehlo.constant dense<0.000000e+00> : tensor<bf16>
    %0 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1x1x384xf32>
    %1 = stablehlo.convert %arg40 : (tensor<8xi1>) -> tensor<8xi64>
    %2 = stablehlo.reduce(%1 init: %c_30) applies stablehlo.add across dimensions = [0] : (tensor<8xi64>, tensor<i64>) -> tensor<i64>
    %3 = stablehlo.clamp %c_31, %2, %arg39 : tensor<i64>
    %4 = stablehlo.convert %3 : (tensor<i64>) -> tensor<f32>
    %5 = stablehlo.divide %cst_32, %4 : tensor<f32>
    %6 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %7 = stablehlo.select %arg40, %6, %cst_20 : tensor<8xi1>, tensor<8xf32>
    %8 = stablehlo.negate %7 : tensor<8xf32>
    %9 = stablehlo.broadcast_in_dim %8, dims = [0] : (tensor<8xf32>) -> tensor<8x1000xf32>
    %10 = stablehlo.broadcast_in_dim %arg38, dims = [0] : (tensor<8xi32>) -> tensor<8x1000xi32>
    %11 = stablehlo.broadcast_in_dim %c_28, dims = [1] : (tensor<1000xi32>) -> tensor<8x1000xi32>
    %12 = stablehlo.compare  EQ, %10, %11 : (tensor<8x1000xi32>, tensor<8x1000xi32>) -> tensor<8x1000xi1>
    %13 = stablehlo.convert %12 : (tensor<8x1000xi1>) -> tensor<8x1000xf32>
    %14 = stablehlo.multiply %9, %13 : tensor<8x1000xf32>
    %15 = stablehlo.reshape %arg12 : (tensor<1x1x384xf32>) -> tensor<1x384xf32>
    %16 = stablehlo.broadcast_in_dim %15, dims = [1, 2] : (tensor<1x384xf32>) -> tensor<8x1x384xf32>
    %17 = stablehlo.transpose %arg11, dims = [0, 3, 1, 2] {result_layout = dense<[1, 3, 2, 0]> : tensor<4xindex>, xla_shape = "u8[8,3,224,224]{1,3,2,0}"} : (tensor<8x224x224x3xui8>) -> tensor<8x3x224x224xui8>
    %18 = stablehlo.convert %17 {result_layout = dense<[1, 3, 2, 0]> : tensor<4xindex>, xla_shape = "f32[8,3,224,224]{1,3,2,0}"} : (tensor<8x3x224x224xui8>) -> tensor<8x3x224x224xf32>
    %19 = stablehlo.reshape %arg10 : (tensor<1x3x1x1xf32>) -> tensor<3xf32>
    %20 = stablehlo.broadcast_in_dim %19, dims = [1] : (tensor<3xf32>) -> tensor<8x3x224x224xf32>
    %21 = stablehlo.subtract %18, %20 : tensor<8x3x224x224xf32>
    %22 = stablehlo.reshape %arg9 : (tensor<1x3x1x1xf32>) -> tensor<3xf32>
    %23 = stablehlo.broadcast_in_dim %22, dims = [1] : (tensor<3xf32>) -> tensor<8x3x224x224xf32>
    %24 = stablehlo.divide %21, %23 : tensor<8x3x224x224xf32>
    %25 = stablehlo.convert %24 : (tensor<8x3x224x224xf32>) -> tensor<8x3x224x224xbf16>
    %26 = stablehlo.reshape %25 : (tensor<8x3x224x224xbf16>) -> tensor<8x3x14x16x14x16xbf16>
    %27 = stablehlo.convert %arg8 : (tensor<384x3x16x16xf32>) -> tensor<384x3x16x16xbf16>
    %28 = stablehlo.dot_general %26, %27, contracting_dims = [1, 3, 5] x [1, 2, 3] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x3x14x16x14x16xbf16>, tensor<384x3x16x16xbf16>) -> tensor<8x14x14x384xbf16>
    %29 = stablehlo.convert %arg7 : (tensor<384xf32>) -> tensor<384xbf16>
    %30 = stablehlo.broadcast_in_dim %29, dims = [3] : (tensor<384xbf16>) -> tensor<8x14x14x384xbf16>
    %31 = stablehlo.add %28, %30 : tensor<8x14x14x384xbf16>
    %32 = stablehlo.reshape %31 : (tensor<8x14x14x384xbf16>) -> tensor<8x196x384xbf16>
    %33 = stablehlo.convert %32 : (tensor<8x196x384xbf16>) -> tensor<8x196x384xf32>
    %34 = stablehlo.concatenate %16, %33, dim = 1 : (tensor<8x1x384xf32>, tensor<8x196x384xf32>) -> tensor<8x197x384xf32>
    %35 = stablehlo.reshape %arg6 : (tensor<1x197x384xf32>) -> tensor<197x384xf32>
    %36 = stablehlo.broadcast_in_dim %35, dims = [1, 2] : (tensor<197x384xf32>) -> tensor<8x197x384xf32>
    %37 = stablehlo.add %34, %36 : tensor<8x197x384xf32>
    %38 = stablehlo.convert %37 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %39 = stablehlo.convert %38 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %40 = stablehlo.reduce(%39 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %41 = stablehlo.multiply %40, %cst_19 : tensor<8x197xf32>
    %42 = stablehlo.reshape %41 : (tensor<8x197xf32>) -> tensor<8x197x1xf32>
    %43 = stablehlo.broadcast_in_dim %41, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %44 = stablehlo.subtract %39, %43 : tensor<8x197x384xf32>
    %45 = stablehlo.multiply %39, %39 : tensor<8x197x384xf32>
    %46 = stablehlo.reduce(%45 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %47 = stablehlo.multiply %46, %cst_19 : tensor<8x197xf32>
    %48 = stablehlo.reshape %47 : (tensor<8x197xf32>) -> tensor<8x197x1xf32>
    %49 = stablehlo.multiply %42, %42 : tensor<8x197x1xf32>
    %50 = stablehlo.subtract %48, %49 : tensor<8x197x1xf32>
    %51 = stablehlo.broadcast_in_dim %arg5, dims = [] : (tensor<f32>) -> tensor<8x197x1xf32>
    %52 = stablehlo.clamp %cst_18, %50, %51 : tensor<8x197x1xf32>
    %53 = stablehlo.broadcast_in_dim %arg4, dims = [] : (tensor<f32>) -> tensor<8x197x1xf32>
    %54 = stablehlo.add %52, %53 : tensor<8x197x1xf32>
    %55 = stablehlo.rsqrt %54 : tensor<8x197x1xf32>
    %56 = stablehlo.reshape %55 : (tensor<8x197x1xf32>) -> tensor<8x197xf32>
    %57 = stablehlo.broadcast_in_dim %56, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %58 = stablehlo.multiply %44, %57 : tensor<8x197x384xf32>
    %59 = stablehlo.broadcast_in_dim %arg13, dims = [2] : (tensor<384xf32>) -> tensor<8x197x384xf32>
    %60 = stablehlo.multiply %58, %59 : tensor<8x197x384xf32>
    %61 = stablehlo.broadcast_in_dim %arg17, dims = [2] : (tensor<384xf32>) -> tensor<8x197x384xf32>
    %62 = stablehlo.add %60, %61 : tensor<8x197x384xf32>
    %63 = stablehlo.convert %62 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %64 = stablehlo.convert %arg14 : (tensor<1152x384xf32>) -> tensor<1152x384xbf16>
    %65 = stablehlo.reshape %64 : (tensor<1152x384xbf16>) -> tensor<3x6x64x384xbf16>
    %66 = stablehlo.dot_general %63, %65, contracting_dims = [2] x [3] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x384xbf16>, tensor<3x6x64x384xbf16>) -> tensor<8x197x3x6x64xbf16>
    %67 = stablehlo.transpose %66, dims = [2, 0, 3, 4, 1] {result_layout = dense<[3, 2, 0, 4, 1]> : tensor<5xindex>, xla_shape = "bf16[3,8,6,64,197]{3,2,0,4,1}"} : (tensor<8x197x3x6x64xbf16>) -> tensor<3x8x6x64x197xbf16>
    %68 = stablehlo.convert %arg16 : (tensor<1152xf32>) -> tensor<1152xbf16>
    %69 = stablehlo.reshape %68 : (tensor<1152xbf16>) -> tensor<3x6x64xbf16>
    %70 = stablehlo.broadcast_in_dim %69, dims = [0, 2, 3] : (tensor<3x6x64xbf16>) -> tensor<3x8x6x64x197xbf16>
    %71 = stablehlo.add %67, %70 : tensor<3x8x6x64x197xbf16>
    %72 = stablehlo.slice %71 [2:3, 0:8, 0:6, 0:64, 0:197] : (tensor<3x8x6x64x197xbf16>) -> tensor<1x8x6x64x197xbf16>
    %73 = stablehlo.reshape %72 : (tensor<1x8x6x64x197xbf16>) -> tensor<8x6x64x197xbf16>
    %74 = stablehlo.slice %71 [1:2, 0:8, 0:6, 0:64, 0:197] : (tensor<3x8x6x64x197xbf16>) -> tensor<1x8x6x64x197xbf16>
    %75 = stablehlo.reshape %74 : (tensor<1x8x6x64x197xbf16>) -> tensor<8x6x64x197xbf16>
    %76 = stablehlo.slice %71 [0:1, 0:8, 0:6, 0:64, 0:197] : (tensor<3x8x6x64x197xbf16>) -> tensor<1x8x6x64x197xbf16>
    %77 = stablehlo.reshape %76 : (tensor<1x8x6x64x197xbf16>) -> tensor<8x6x64x197xbf16>
    %78 = stablehlo.convert %77 : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %79 = stablehlo.broadcast_in_dim %arg15, dims = [] : (tensor<f32>) -> tensor<8x6x64x197xf32>
    %80 = stablehlo.multiply %78, %79 : tensor<8x6x64x197xf32>
    %81 = stablehlo.convert %80 : (tensor<8x6x64x197xf32>) -> tensor<8x6x64x197xbf16>
    %82 = stablehlo.dot_general %75, %81, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x6x64x197xbf16>) -> tensor<8x6x197x197xbf16>
    %83 = stablehlo.reduce(%82 init: %cst_27) applies stablehlo.maximum across dimensions = [2] : (tensor<8x6x197x197xbf16>, tensor<bf16>) -> tensor<8x6x197xbf16>
    %84 = stablehlo.broadcast_in_dim %83, dims = [0, 1, 3] : (tensor<8x6x197xbf16>) -> tensor<8x6x197x197xbf16>
    %85 = stablehlo.subtract %82, %84 : tensor<8x6x197x197xbf16>
    %86 = stablehlo.exponential %85 : tensor<8x6x197x197xbf16>
    %87 = stablehlo.convert %86 : (tensor<8x6x197x197xbf16>) -> tensor<8x6x197x197xf32>
    %88 = stablehlo.reduce(%87 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x6x197x197xf32>, tensor<f32>) -> tensor<8x6x197xf32>
    %89 = stablehlo.reshape %88 : (tensor<8x6x197xf32>) -> tensor<8x6x1x197xf32>
    %90 = stablehlo.divide %cst_17, %89 : tensor<8x6x1x197xf32>
    %91 = stablehlo.reshape %90 : (tensor<8x6x1x197xf32>) -> tensor<8x6x197xf32>
    %92 = stablehlo.broadcast_in_dim %91, dims = [0, 1, 3] : (tensor<8x6x197xf32>) -> tensor<8x6x197x197xf32>
    %93 = stablehlo.multiply %87, %92 : tensor<8x6x197x197xf32>
    %94 = stablehlo.convert %93 : (tensor<8x6x197x197xf32>) -> tensor<8x6x197x197xbf16>
    %95 = stablehlo.dot_general %73, %94, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x6x197x197xbf16>) -> tensor<8x6x64x197xbf16>
    %96 = stablehlo.convert %arg18 : (tensor<384x384xf32>) -> tensor<384x384xbf16>
    %97 = stablehlo.reshape %96 : (tensor<384x384xbf16>) -> tensor<384x6x64xbf16>
    %98 = stablehlo.dot_general %95, %97, contracting_dims = [1, 2] x [1, 2] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<384x6x64xbf16>) -> tensor<8x197x384xbf16>
    %99 = stablehlo.convert %arg19 : (tensor<384xf32>) -> tensor<384xbf16>
    %100 = stablehlo.broadcast_in_dim %99, dims = [2] : (tensor<384xbf16>) -> tensor<8x197x384xbf16>
    %101 = stablehlo.add %98, %100 : tensor<8x197x384xbf16>
    %102 = stablehlo.add %38, %101 : tensor<8x197x384xbf16>
    %103 = stablehlo.convert %102 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %104 = stablehlo.reduce(%103 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %105 = stablehlo.multiply %104, %cst_19 : tensor<8x197xf32>
    %106 = stablehlo.reshape %105 : (tensor<8x197xf32>) -> tensor<8x197x1xf32>
    %107 = stablehlo.broadcast_in_dim %105, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %108 = stablehlo.subtract %103, %107 : tensor<8x197x384xf32>
    %109 = stablehlo.multiply %103, %103 : tensor<8x197x384xf32>
    %110 = stablehlo.reduce(%109 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %111 = stablehlo.multiply %110, %cst_19 : tensor<8x197xf32>
    %112 = stablehlo.reshape %111 : (tensor<8x197xf32>) -> tensor<8x197x1xf32>
    %113 = stablehlo.multiply %106, %106 : tensor<8x197x1xf32>
    %114 = stablehlo.subtract %112, %113 : tensor<8x197x1xf32>
    %115 = stablehlo.clamp %cst_18, %114, %51 : tensor<8x197x1xf32>
    %116 = stablehlo.add %115, %53 : tensor<8x197x1xf32>
    %117 = stablehlo.rsqrt %116 : tensor<8x197x1xf32>
    %118 = stablehlo.reshape %117 : (tensor<8x197x1xf32>) -> tensor<8x197xf32>
    %119 = stablehlo.broadcast_in_dim %118, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %120 = stablehlo.multiply %108, %119 : tensor<8x197x384xf32>
    %121 = stablehlo.broadcast_in_dim %arg20, dims = [2] : (tensor<384xf32>) -> tensor<8x197x384xf32>
    %122 = stablehlo.multiply %120, %121 : tensor<8x197x384xf32>
    %123 = stablehlo.broadcast_in_dim %arg28, dims = [2] : (tensor<384xf32>) -> tensor<8x197x384xf32>
    %124 = stablehlo.add %122, %123 : tensor<8x197x384xf32>
    %125 = stablehlo.convert %124 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %126 = stablehlo.convert %arg21 : (tensor<1536x384xf32>) -> tensor<1536x384xbf16>
    %127 = stablehlo.dot_general %125, %126, contracting_dims = [2] x [1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x384xbf16>, tensor<1536x384xbf16>) -> tensor<8x197x1536xbf16>
    %128 = stablehlo.convert %arg27 : (tensor<1536xf32>) -> tensor<1536xbf16>
    %129 = stablehlo.broadcast_in_dim %128, dims = [2] : (tensor<1536xbf16>) -> tensor<8x197x1536xbf16>
    %130 = stablehlo.add %127, %129 : tensor<8x197x1536xbf16>
    %131 = stablehlo.convert %130 : (tensor<8x197x1536xbf16>) -> tensor<8x197x1536xf32>
    %132 = stablehlo.broadcast_in_dim %arg26, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %133 = stablehlo.multiply %131, %131 : tensor<8x197x1536xf32>
    %134 = stablehlo.broadcast_in_dim %arg25, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %135 = stablehlo.clamp %132, %133, %134 : tensor<8x197x1536xf32>
    %136 = stablehlo.broadcast_in_dim %arg30, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %137 = stablehlo.multiply %135, %136 : tensor<8x197x1536xf32>
    %138 = stablehlo.broadcast_in_dim %arg29, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %139 = stablehlo.add %137, %138 : tensor<8x197x1536xf32>
    %140 = stablehlo.multiply %135, %139 : tensor<8x197x1536xf32>
    %141 = stablehlo.broadcast_in_dim %arg22, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %142 = stablehlo.add %140, %141 : tensor<8x197x1536xf32>
    %143 = stablehlo.multiply %131, %142 : tensor<8x197x1536xf32>
    %144 = stablehlo.tanh %143 : tensor<8x197x1536xf32>
    %145 = stablehlo.broadcast_in_dim %arg31, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %146 = stablehlo.multiply %144, %145 : tensor<8x197x1536xf32>
    %147 = stablehlo.add %146, %145 : tensor<8x197x1536xf32>
    %148 = stablehlo.multiply %131, %147 : tensor<8x197x1536xf32>
    %149 = stablehlo.convert %148 : (tensor<8x197x1536xf32>) -> tensor<8x197x1536xbf16>
    %150 = stablehlo.convert %arg32 : (tensor<384x1536xf32>) -> tensor<384x1536xbf16>
    %151 = stablehlo.dot_general %149, %150, contracting_dims = [2] x [1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x1536xbf16>, tensor<384x1536xbf16>) -> tensor<8x197x384xbf16>
    %152 = stablehlo.convert %arg33 : (tensor<384xf32>) -> tensor<384xbf16>
    %153 = stablehlo.broadcast_in_dim %152, dims = [2] : (tensor<384xbf16>) -> tensor<8x197x384xbf16>
    %154 = stablehlo.add %151, %153 : tensor<8x197x384xbf16>
    %155 = stablehlo.add %102, %154 : tensor<8x197x384xbf16>
    %156 = stablehlo.convert %155 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %157 = stablehlo.broadcast_in_dim %cst_16, dims = [1] : (tensor<197xf32>) -> tensor<8x197x384xf32>
    %158 = stablehlo.multiply %156, %157 : tensor<8x197x384xf32>
    %159 = stablehlo.convert %158 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %160 = stablehlo.reduce(%159 init: %cst_33) applies stablehlo.add across dimensions = [1] : (tensor<8x197x384xbf16>, tensor<bf16>) -> tensor<8x384xbf16>
    %161 = stablehlo.reshape %160 : (tensor<8x384xbf16>) -> tensor<8x1x384xbf16>
    %162 = stablehlo.convert %161 : (tensor<8x1x384xbf16>) -> tensor<8x1x384xf32>
    %163 = stablehlo.reduce(%162 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<8x1xf32>
    %164 = stablehlo.multiply %163, %cst_15 : tensor<8x1xf32>
    %165 = stablehlo.reshape %164 : (tensor<8x1xf32>) -> tensor<8x1x1xf32>
    %166 = stablehlo.broadcast_in_dim %164, dims = [0, 1] : (tensor<8x1xf32>) -> tensor<8x1x384xf32>
    %167 = stablehlo.subtract %162, %166 : tensor<8x1x384xf32>
    %168 = stablehlo.multiply %162, %162 : tensor<8x1x384xf32>
    %169 = stablehlo.reduce(%168 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<8x1xf32>
    %170 = stablehlo.multiply %169, %cst_15 : tensor<8x1xf32>
    %171 = stablehlo.reshape %170 : (tensor<8x1xf32>) -> tensor<8x1x1xf32>
    %172 = stablehlo.multiply %165, %165 : tensor<8x1x1xf32>
    %173 = stablehlo.subtract %171, %172 : tensor<8x1x1xf32>
    %174 = stablehlo.broadcast_in_dim %arg5, dims = [] : (tensor<f32>) -> tensor<8x1x1xf32>
    %175 = stablehlo.clamp %cst_14, %173, %174 : tensor<8x1x1xf32>
    %176 = stablehlo.broadcast_in_dim %arg4, dims = [] : (tensor<f32>) -> tensor<8x1x1xf32>
    %177 = stablehlo.add %175, %176 : tensor<8x1x1xf32>
    %178 = stablehlo.rsqrt %177 : tensor<8x1x1xf32>
    %179 = stablehlo.reshape %178 : (tensor<8x1x1xf32>) -> tensor<8x1xf32>
    %180 = stablehlo.broadcast_in_dim %179, dims = [0, 1] : (tensor<8x1xf32>) -> tensor<8x1x384xf32>
    %181 = stablehlo.multiply %167, %180 : tensor<8x1x384xf32>
    %182 = stablehlo.broadcast_in_dim %arg34, dims = [2] : (tensor<384xf32>) -> tensor<8x1x384xf32>
    %183 = stablehlo.multiply %181, %182 : tensor<8x1x384xf32>
    %184 = stablehlo.broadcast_in_dim %arg37, dims = [2] : (tensor<384xf32>) -> tensor<8x1x384xf32>
    %185 = stablehlo.add %183, %184 : tensor<8x1x384xf32>
    %186 = stablehlo.convert %185 : (tensor<8x1x384xf32>) -> tensor<8x1x384xbf16>
    %187 = stablehlo.reshape %186 : (tensor<8x1x384xbf16>) -> tensor<8x384xbf16>
    %188 = stablehlo.convert %arg35 : (tensor<1000x384xf32>) -> tensor<1000x384xbf16>
    %189 = stablehlo.dot_general %187, %188, contracting_dims = [1] x [1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x384xbf16>, tensor<1000x384xbf16>) -> tensor<8x1000xbf16>
    %190 = stablehlo.convert %arg36 : (tensor<1000xf32>) -> tensor<1000xbf16>
    %191 = stablehlo.broadcast_in_dim %190, dims = [1] : (tensor<1000xbf16>) -> tensor<8x1000xbf16>
    %192 = stablehlo.add %189, %191 : tensor<8x1000xbf16>
    %193 = stablehlo.convert %192 : (tensor<8x1000xbf16>) -> tensor<8x1000xf32>
    %194 = stablehlo.reduce(%193 init: %cst_26) applies stablehlo.maximum across dimensions = [1] : (tensor<8x1000xf32>, tensor<f32>) -> tensor<8xf32>
    %195 = stablehlo.broadcast_in_dim %194, dims = [0] : (tensor<8xf32>) -> tensor<8x1000xf32>
    %196 = stablehlo.subtract %193, %195 : tensor<8x1000xf32>
    %197 = stablehlo.exponential %196 : tensor<8x1000xf32>
    %198 = stablehlo.reduce(%197 init: %cst_29) applies stablehlo.add across dimensions = [1] : (tensor<8x1000xf32>, tensor<f32>) -> tensor<8xf32>
    %199 = stablehlo.log %198 : tensor<8xf32>
    %200 = stablehlo.broadcast_in_dim %199, dims = [0] : (tensor<8xf32>) -> tensor<8x1000xf32>
    %201 = stablehlo.subtract %196, %200 : tensor<8x1000xf32>
    %202 = stablehlo.exponential %201 : tensor<8x1000xf32>
    %203 = stablehlo.reduce(%14 init: %cst_29) applies stablehlo.add across dimensions = [1] : (tensor<8x1000xf32>, tensor<f32>) -> tensor<8xf32>
    %204 = stablehlo.broadcast_in_dim %203, dims = [0] : (tensor<8xf32>) -> tensor<8x1000xf32>
    %205 = stablehlo.multiply %202, %204 : tensor<8x1000xf32>
    %206 = stablehlo.subtract %14, %205 : tensor<8x1000xf32>
    %207 = stablehlo.convert %206 : (tensor<8x1000xf32>) -> tensor<8x1000xbf16>
    %208 = stablehlo.dot_general %207, %188, contracting_dims = [1] x [0] : (tensor<8x1000xbf16>, tensor<1000x384xbf16>) -> tensor<8x384xbf16>
    %209 = stablehlo.reshape %208 : (tensor<8x384xbf16>) -> tensor<8x1x384xbf16>
    %210 = stablehlo.convert %209 : (tensor<8x1x384xbf16>) -> tensor<8x1x384xf32>
    %211 = stablehlo.multiply %210, %182 : tensor<8x1x384xf32>
    %212 = stablehlo.reduce(%211 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<8x1xf32>
    %213 = stablehlo.multiply %212, %cst_15 : tensor<8x1xf32>
    %214 = stablehlo.broadcast_in_dim %213, dims = [0, 1] : (tensor<8x1xf32>) -> tensor<8x1x384xf32>
    %215 = stablehlo.subtract %211, %214 : tensor<8x1x384xf32>
    %216 = stablehlo.multiply %211, %181 : tensor<8x1x384xf32>
    %217 = stablehlo.reduce(%216 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<8x1xf32>
    %218 = stablehlo.multiply %217, %cst_15 : tensor<8x1xf32>
    %219 = stablehlo.broadcast_in_dim %218, dims = [0, 1] : (tensor<8x1xf32>) -> tensor<8x1x384xf32>
    %220 = stablehlo.multiply %181, %219 : tensor<8x1x384xf32>
    %221 = stablehlo.subtract %215, %220 : tensor<8x1x384xf32>
    %222 = stablehlo.multiply %221, %180 : tensor<8x1x384xf32>
    %223 = stablehlo.convert %222 : (tensor<8x1x384xf32>) -> tensor<8x1x384xbf16>
    %224 = stablehlo.reshape %223 : (tensor<8x1x384xbf16>) -> tensor<8x384xbf16>
    %225 = stablehlo.broadcast_in_dim %224, dims = [0, 2] : (tensor<8x384xbf16>) -> tensor<8x197x384xbf16>
    %226 = stablehlo.convert %225 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %227 = stablehlo.multiply %226, %157 : tensor<8x197x384xf32>
    %228 = stablehlo.convert %227 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %229 = stablehlo.dot_general %228, %150, contracting_dims = [2] x [0] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x384xbf16>, tensor<384x1536xbf16>) -> tensor<8x197x1536xbf16>
    %230 = stablehlo.convert %229 : (tensor<8x197x1536xbf16>) -> tensor<8x197x1536xf32>
    %231 = stablehlo.multiply %131, %145 : tensor<8x197x1536xf32>
    %232 = stablehlo.multiply %144, %144 : tensor<8x197x1536xf32>
    %233 = stablehlo.subtract %cst_13, %232 : tensor<8x197x1536xf32>
    %234 = stablehlo.multiply %231, %233 : tensor<8x197x1536xf32>
    %235 = stablehlo.broadcast_in_dim %arg24, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %236 = stablehlo.multiply %135, %235 : tensor<8x197x1536xf32>
    %237 = stablehlo.broadcast_in_dim %arg23, dims = [] : (tensor<f32>) -> tensor<8x197x1536xf32>
    %238 = stablehlo.add %236, %237 : tensor<8x197x1536xf32>
    %239 = stablehlo.multiply %135, %238 : tensor<8x197x1536xf32>
    %240 = stablehlo.add %239, %141 : tensor<8x197x1536xf32>
    %241 = stablehlo.multiply %234, %240 : tensor<8x197x1536xf32>
    %242 = stablehlo.add %147, %241 : tensor<8x197x1536xf32>
    %243 = stablehlo.multiply %230, %242 : tensor<8x197x1536xf32>
    %244 = stablehlo.convert %243 : (tensor<8x197x1536xf32>) -> tensor<8x197x1536xbf16>
    %245 = stablehlo.dot_general %244, %126, contracting_dims = [2] x [0] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x1536xbf16>, tensor<1536x384xbf16>) -> tensor<8x197x384xbf16>
    %246 = stablehlo.convert %245 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %247 = stablehlo.multiply %246, %121 : tensor<8x197x384xf32>
    %248 = stablehlo.reduce(%247 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %249 = stablehlo.multiply %248, %cst_19 : tensor<8x197xf32>
    %250 = stablehlo.broadcast_in_dim %249, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %251 = stablehlo.subtract %247, %250 : tensor<8x197x384xf32>
    %252 = stablehlo.multiply %247, %120 : tensor<8x197x384xf32>
    %253 = stablehlo.reduce(%252 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %254 = stablehlo.multiply %253, %cst_19 : tensor<8x197xf32>
    %255 = stablehlo.broadcast_in_dim %254, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %256 = stablehlo.multiply %120, %255 : tensor<8x197x384xf32>
    %257 = stablehlo.subtract %251, %256 : tensor<8x197x384xf32>
    %258 = stablehlo.multiply %257, %119 : tensor<8x197x384xf32>
    %259 = stablehlo.convert %258 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %260 = stablehlo.add %228, %259 : tensor<8x197x384xbf16>
    %261 = stablehlo.convert %94 : (tensor<8x6x197x197xbf16>) -> tensor<8x6x197x197xf32>
    %262 = stablehlo.dot_general %260, %97, contracting_dims = [2] x [0] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x384xbf16>, tensor<384x6x64xbf16>) -> tensor<8x197x6x64xbf16>
    %263 = stablehlo.transpose %262, dims = [0, 2, 3, 1] {result_layout = dense<[2, 1, 3, 0]> : tensor<4xindex>, xla_shape = "bf16[8,6,64,197]{2,1,3,0}"} : (tensor<8x197x6x64xbf16>) -> tensor<8x6x64x197xbf16>
    %264 = stablehlo.dot_general %73, %263, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x6x64x197xbf16>) -> tensor<8x6x197x197xbf16>
    %265 = stablehlo.convert %264 : (tensor<8x6x197x197xbf16>) -> tensor<8x6x197x197xf32>
    %266 = stablehlo.convert %263 {result_layout = dense<[2, 1, 3, 0]> : tensor<4xindex>, xla_shape = "f32[8,6,64,197]{2,1,3,0}"} : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %267 = stablehlo.convert %95 : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %268 = stablehlo.multiply %266, %267 {result_layout = dense<[2, 1, 3, 0]> : tensor<4xindex>, xla_shape = "f32[8,6,64,197]{2,1,3,0}"} : tensor<8x6x64x197xf32>
    %269 = stablehlo.convert %268 {result_layout = dense<[2, 1, 3, 0]> : tensor<4xindex>, xla_shape = "bf16[8,6,64,197]{2,1,3,0}"} : (tensor<8x6x64x197xf32>) -> tensor<8x6x64x197xbf16>
    %270 = stablehlo.dot_general %269, %cst_12, contracting_dims = [2] x [0] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<64x8xbf16>) -> tensor<8x6x197x8xbf16>
    %271 = stablehlo.transpose %270, dims = [0, 1, 3, 2] {result_layout = dense<[2, 3, 1, 0]> : tensor<4xindex>, xla_shape = "bf16[8,6,8,197]{2,3,1,0}"} : (tensor<8x6x197x8xbf16>) -> tensor<8x6x8x197xbf16>
    %272 = stablehlo.slice %271 [0:8, 0:6, 0:1, 0:197] : (tensor<8x6x8x197xbf16>) -> tensor<8x6x1x197xbf16>
    %273 = stablehlo.convert %272 : (tensor<8x6x1x197xbf16>) -> tensor<8x6x1x197xf32>
    %274 = stablehlo.reshape %273 : (tensor<8x6x1x197xf32>) -> tensor<8x6x197xf32>
    %275 = stablehlo.broadcast_in_dim %274, dims = [0, 1, 3] : (tensor<8x6x197xf32>) -> tensor<8x6x197x197xf32>
    %276 = stablehlo.subtract %265, %275 : tensor<8x6x197x197xf32>
    %277 = stablehlo.multiply %261, %276 : tensor<8x6x197x197xf32>
    %278 = stablehlo.convert %277 : (tensor<8x6x197x197xf32>) -> tensor<8x6x197x197xbf16>
    %279 = stablehlo.dot_general %75, %278, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x6x197x197xbf16>) -> tensor<8x6x64x197xbf16>
    %280 = stablehlo.convert %279 : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %281 = stablehlo.multiply %280, %79 : tensor<8x6x64x197xf32>
    %282 = stablehlo.convert %281 : (tensor<8x6x64x197xf32>) -> tensor<8x6x64x197xbf16>
    %283 = stablehlo.slice %65 [0:1, 0:6, 0:64, 0:384] : (tensor<3x6x64x384xbf16>) -> tensor<1x6x64x384xbf16>
    %284 = stablehlo.reshape %283 : (tensor<1x6x64x384xbf16>) -> tensor<6x64x384xbf16>
    %285 = stablehlo.dot_general %282, %284, contracting_dims = [1, 2] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<6x64x384xbf16>) -> tensor<8x197x384xbf16>
    %286 = stablehlo.dot_general %81, %278, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x6x197x197xbf16>) -> tensor<8x6x64x197xbf16>
    %287 = stablehlo.slice %65 [1:2, 0:6, 0:64, 0:384] : (tensor<3x6x64x384xbf16>) -> tensor<1x6x64x384xbf16>
    %288 = stablehlo.reshape %287 : (tensor<1x6x64x384xbf16>) -> tensor<6x64x384xbf16>
    %289 = stablehlo.dot_general %286, %288, contracting_dims = [1, 2] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<6x64x384xbf16>) -> tensor<8x197x384xbf16>
    %290 = stablehlo.add %285, %289 : tensor<8x197x384xbf16>
    %291 = stablehlo.dot_general %263, %94, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x6x197x197xbf16>) -> tensor<8x6x64x197xbf16>
    %292 = stablehlo.slice %65 [2:3, 0:6, 0:64, 0:384] : (tensor<3x6x64x384xbf16>) -> tensor<1x6x64x384xbf16>
    %293 = stablehlo.reshape %292 : (tensor<1x6x64x384xbf16>) -> tensor<6x64x384xbf16>
    %294 = stablehlo.dot_general %291, %293, contracting_dims = [1, 2] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<6x64x384xbf16>) -> tensor<8x197x384xbf16>
    %295 = stablehlo.add %290, %294 : tensor<8x197x384xbf16>
    %296 = stablehlo.convert %295 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %297 = stablehlo.multiply %296, %59 : tensor<8x197x384xf32>
    %298 = stablehlo.reduce(%297 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %299 = stablehlo.multiply %298, %cst_19 : tensor<8x197xf32>
    %300 = stablehlo.broadcast_in_dim %299, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %301 = stablehlo.subtract %297, %300 : tensor<8x197x384xf32>
    %302 = stablehlo.multiply %297, %58 : tensor<8x197x384xf32>
    %303 = stablehlo.reduce(%302 init: %cst_29) applies stablehlo.add across dimensions = [2] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<8x197xf32>
    %304 = stablehlo.multiply %303, %cst_19 : tensor<8x197xf32>
    %305 = stablehlo.broadcast_in_dim %304, dims = [0, 1] : (tensor<8x197xf32>) -> tensor<8x197x384xf32>
    %306 = stablehlo.multiply %58, %305 : tensor<8x197x384xf32>
    %307 = stablehlo.subtract %301, %306 : tensor<8x197x384xf32>
    %308 = stablehlo.multiply %307, %57 : tensor<8x197x384xf32>
    %309 = stablehlo.convert %308 : (tensor<8x197x384xf32>) -> tensor<8x197x384xbf16>
    %310 = stablehlo.add %260, %309 : tensor<8x197x384xbf16>
    %311 = stablehlo.convert %310 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %312 = stablehlo.slice %311 [0:8, 0:1, 0:384] : (tensor<8x197x384xf32>) -> tensor<8x1x384xf32>
    %313 = stablehlo.reduce(%312 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<1x384xf32>
    %314 = stablehlo.reshape %313 : (tensor<1x384xf32>) -> tensor<1x1x384xf32>
    %315 = stablehlo.subtract %314, %arg44 : tensor<1x1x384xf32>
    %316 = stablehlo.multiply %0, %315 : tensor<1x1x384xf32>
    %317 = stablehlo.add %arg44, %316 : tensor<1x1x384xf32>
    %318 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1x1x384xf32>
    %319 = stablehlo.multiply %arg42, %318 : tensor<1x1x384xf32>
    %320 = stablehlo.multiply %314, %314 : tensor<1x1x384xf32>
    %321 = stablehlo.convert %arg3 : (tensor<f64>) -> tensor<f32>
    %322 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1x1x384xf32>
    %323 = stablehlo.multiply %320, %322 : tensor<1x1x384xf32>
    %324 = stablehlo.add %319, %323 : tensor<1x1x384xf32>
    %325 = stablehlo.sqrt %324 : tensor<1x1x384xf32>
    %326 = stablehlo.add %arg1, %cst_32 : tensor<f32>
    %327 = stablehlo.power %cst_25, %326 : tensor<f32>
    %328 = stablehlo.subtract %cst_32, %327 : tensor<f32>
    %329 = stablehlo.sqrt %328 : tensor<f32>
    %330 = stablehlo.slice %arg2 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
    %331 = stablehlo.reshape %330 : (tensor<1xf32>) -> tensor<f32>
    %332 = stablehlo.power %cst_24, %326 : tensor<f32>
    %333 = stablehlo.subtract %cst_32, %332 : tensor<f32>
    %334 = stablehlo.divide %331, %333 : tensor<f32>
    %335 = stablehlo.negate %334 : tensor<f32>
    %336 = stablehlo.multiply %329, %335 : tensor<f32>
    %337 = stablehlo.broadcast_in_dim %336, dims = [] : (tensor<f32>) -> tensor<1x1x384xf32>
    %338 = stablehlo.divide %325, %337 : tensor<1x1x384xf32>
    %339 = stablehlo.divide %cst_32, %335 : tensor<f32>
    %340 = stablehlo.multiply %339, %arg0 : tensor<f32>
    %341 = stablehlo.broadcast_in_dim %340, dims = [] : (tensor<f32>) -> tensor<1x1x384xf32>
    %342 = stablehlo.add %338, %341 : tensor<1x1x384xf32>
    %343 = stablehlo.divide %317, %342 : tensor<1x1x384xf32>
    %344 = stablehlo.add %arg12, %343 : tensor<1x1x384xf32>
    %345 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1x197x384xf32>
    %346 = stablehlo.reduce(%311 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<197x384xf32>
    %347 = stablehlo.reshape %346 : (tensor<197x384xf32>) -> tensor<1x197x384xf32>
    %348 = stablehlo.subtract %347, %arg47 : tensor<1x197x384xf32>
    %349 = stablehlo.multiply %345, %348 : tensor<1x197x384xf32>
    %350 = stablehlo.add %arg47, %349 : tensor<1x197x384xf32>
    %351 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1x197x384xf32>
    %352 = stablehlo.multiply %arg46, %351 : tensor<1x197x384xf32>
    %353 = stablehlo.multiply %347, %347 : tensor<1x197x384xf32>
    %354 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1x197x384xf32>
    %355 = stablehlo.multiply %353, %354 : tensor<1x197x384xf32>
    %356 = stablehlo.add %352, %355 : tensor<1x197x384xf32>
    %357 = stablehlo.sqrt %356 : tensor<1x197x384xf32>
    %358 = stablehlo.add %arg45, %cst_32 : tensor<f32>
    %359 = stablehlo.power %cst_25, %358 : tensor<f32>
    %360 = stablehlo.subtract %cst_32, %359 : tensor<f32>
    %361 = stablehlo.sqrt %360 : tensor<f32>
    %362 = stablehlo.power %cst_24, %358 : tensor<f32>
    %363 = stablehlo.subtract %cst_32, %362 : tensor<f32>
    %364 = stablehlo.divide %331, %363 : tensor<f32>
    %365 = stablehlo.negate %364 : tensor<f32>
    %366 = stablehlo.multiply %361, %365 : tensor<f32>
    %367 = stablehlo.broadcast_in_dim %366, dims = [] : (tensor<f32>) -> tensor<1x197x384xf32>
    %368 = stablehlo.divide %357, %367 : tensor<1x197x384xf32>
    %369 = stablehlo.divide %cst_32, %365 : tensor<f32>
    %370 = stablehlo.multiply %369, %arg0 : tensor<f32>
    %371 = stablehlo.broadcast_in_dim %370, dims = [] : (tensor<f32>) -> tensor<1x197x384xf32>
    %372 = stablehlo.add %368, %371 : tensor<1x197x384xf32>
    %373 = stablehlo.divide %350, %372 : tensor<1x197x384xf32>
    %374 = stablehlo.add %arg6, %373 : tensor<1x197x384xf32>
    %375 = stablehlo.slice %arg2 [1:2] : (tensor<2xf32>) -> tensor<1xf32>
    %376 = stablehlo.reshape %375 : (tensor<1xf32>) -> tensor<f32>
    %377 = stablehlo.multiply %376, %arg51 : tensor<f32>
    %378 = stablehlo.subtract %cst_32, %377 : tensor<f32>
    %379 = stablehlo.broadcast_in_dim %378, dims = [] : (tensor<f32>) -> tensor<384x3x16x16xf32>
    %380 = stablehlo.multiply %arg8, %379 : tensor<384x3x16x16xf32>
    %381 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<384x3x16x16xf32>
    %382 = stablehlo.slice %311 [0:8, 1:197, 0:384] : (tensor<8x197x384xf32>) -> tensor<8x196x384xf32>
    %383 = stablehlo.convert %382 : (tensor<8x196x384xf32>) -> tensor<8x196x384xbf16>
    %384 = stablehlo.reshape %383 : (tensor<8x196x384xbf16>) -> tensor<8x14x14x384xbf16>
    %385 = stablehlo.dot_general %384, %26, contracting_dims = [0, 1, 2] x [0, 2, 4] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x14x14x384xbf16>, tensor<8x3x14x16x14x16xbf16>) -> tensor<384x3x16x16xbf16>
    %386 = stablehlo.convert %385 : (tensor<384x3x16x16xbf16>) -> tensor<384x3x16x16xf32>
    %387 = stablehlo.subtract %386, %arg50 : tensor<384x3x16x16xf32>
    %388 = stablehlo.multiply %381, %387 : tensor<384x3x16x16xf32>
    %389 = stablehlo.add %arg50, %388 : tensor<384x3x16x16xf32>
    %390 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<384x3x16x16xf32>
    %391 = stablehlo.multiply %arg49, %390 : tensor<384x3x16x16xf32>
    %392 = stablehlo.multiply %386, %386 : tensor<384x3x16x16xf32>
    %393 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<384x3x16x16xf32>
    %394 = stablehlo.multiply %392, %393 : tensor<384x3x16x16xf32>
    %395 = stablehlo.add %391, %394 : tensor<384x3x16x16xf32>
    %396 = stablehlo.sqrt %395 : tensor<384x3x16x16xf32>
    %397 = stablehlo.add %arg48, %cst_32 : tensor<f32>
    %398 = stablehlo.power %cst_25, %397 : tensor<f32>
    %399 = stablehlo.subtract %cst_32, %398 : tensor<f32>
    %400 = stablehlo.sqrt %399 : tensor<f32>
    %401 = stablehlo.power %cst_24, %397 : tensor<f32>
    %402 = stablehlo.subtract %cst_32, %401 : tensor<f32>
    %403 = stablehlo.divide %376, %402 : tensor<f32>
    %404 = stablehlo.negate %403 : tensor<f32>
    %405 = stablehlo.multiply %400, %404 : tensor<f32>
    %406 = stablehlo.broadcast_in_dim %405, dims = [] : (tensor<f32>) -> tensor<384x3x16x16xf32>
    %407 = stablehlo.divide %396, %406 : tensor<384x3x16x16xf32>
    %408 = stablehlo.divide %cst_32, %404 : tensor<f32>
    %409 = stablehlo.multiply %408, %arg0 : tensor<f32>
    %410 = stablehlo.broadcast_in_dim %409, dims = [] : (tensor<f32>) -> tensor<384x3x16x16xf32>
    %411 = stablehlo.add %407, %410 : tensor<384x3x16x16xf32>
    %412 = stablehlo.divide %389, %411 : tensor<384x3x16x16xf32>
    %413 = stablehlo.add %380, %412 : tensor<384x3x16x16xf32>
    %414 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %415 = stablehlo.convert %384 : (tensor<8x14x14x384xbf16>) -> tensor<8x14x14x384xf32>
    %416 = stablehlo.reduce(%415 init: %cst_29) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<8x14x14x384xf32>, tensor<f32>) -> tensor<384xf32>
    %417 = stablehlo.subtract %416, %arg54 : tensor<384xf32>
    %418 = stablehlo.multiply %414, %417 : tensor<384xf32>
    %419 = stablehlo.add %arg54, %418 : tensor<384xf32>
    %420 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %421 = stablehlo.multiply %arg53, %420 : tensor<384xf32>
    %422 = stablehlo.multiply %416, %416 : tensor<384xf32>
    %423 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %424 = stablehlo.multiply %422, %423 : tensor<384xf32>
    %425 = stablehlo.add %421, %424 : tensor<384xf32>
    %426 = stablehlo.sqrt %425 : tensor<384xf32>
    %427 = stablehlo.add %arg52, %cst_32 : tensor<f32>
    %428 = stablehlo.power %cst_25, %427 : tensor<f32>
    %429 = stablehlo.subtract %cst_32, %428 : tensor<f32>
    %430 = stablehlo.sqrt %429 : tensor<f32>
    %431 = stablehlo.power %cst_24, %427 : tensor<f32>
    %432 = stablehlo.subtract %cst_32, %431 : tensor<f32>
    %433 = stablehlo.divide %331, %432 : tensor<f32>
    %434 = stablehlo.negate %433 : tensor<f32>
    %435 = stablehlo.multiply %430, %434 : tensor<f32>
    %436 = stablehlo.broadcast_in_dim %435, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %437 = stablehlo.divide %426, %436 : tensor<384xf32>
    %438 = stablehlo.divide %cst_32, %434 : tensor<f32>
    %439 = stablehlo.multiply %438, %arg0 : tensor<f32>
    %440 = stablehlo.broadcast_in_dim %439, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %441 = stablehlo.add %437, %440 : tensor<384xf32>
    %442 = stablehlo.divide %419, %441 : tensor<384xf32>
    %443 = stablehlo.add %arg7, %442 : tensor<384xf32>
    %444 = stablehlo.multiply %296, %58 : tensor<8x197x384xf32>
    %445 = stablehlo.reduce(%444 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<384xf32>
    %446 = stablehlo.subtract %445, %arg57 : tensor<384xf32>
    %447 = stablehlo.multiply %414, %446 : tensor<384xf32>
    %448 = stablehlo.add %arg57, %447 : tensor<384xf32>
    %449 = stablehlo.multiply %arg56, %420 : tensor<384xf32>
    %450 = stablehlo.multiply %445, %445 : tensor<384xf32>
    %451 = stablehlo.multiply %450, %423 : tensor<384xf32>
    %452 = stablehlo.add %449, %451 : tensor<384xf32>
    %453 = stablehlo.sqrt %452 : tensor<384xf32>
    %454 = stablehlo.add %arg55, %cst_32 : tensor<f32>
    %455 = stablehlo.power %cst_25, %454 : tensor<f32>
    %456 = stablehlo.subtract %cst_32, %455 : tensor<f32>
    %457 = stablehlo.sqrt %456 : tensor<f32>
    %458 = stablehlo.power %cst_24, %454 : tensor<f32>
    %459 = stablehlo.subtract %cst_32, %458 : tensor<f32>
    %460 = stablehlo.divide %331, %459 : tensor<f32>
    %461 = stablehlo.negate %460 : tensor<f32>
    %462 = stablehlo.multiply %457, %461 : tensor<f32>
    %463 = stablehlo.broadcast_in_dim %462, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %464 = stablehlo.divide %453, %463 : tensor<384xf32>
    %465 = stablehlo.divide %cst_32, %461 : tensor<f32>
    %466 = stablehlo.multiply %465, %arg0 : tensor<f32>
    %467 = stablehlo.broadcast_in_dim %466, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %468 = stablehlo.add %464, %467 : tensor<384xf32>
    %469 = stablehlo.divide %448, %468 : tensor<384xf32>
    %470 = stablehlo.add %arg13, %469 : tensor<384xf32>
    %471 = stablehlo.reduce(%296 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<384xf32>
    %472 = stablehlo.subtract %471, %arg60 : tensor<384xf32>
    %473 = stablehlo.multiply %414, %472 : tensor<384xf32>
    %474 = stablehlo.add %arg60, %473 : tensor<384xf32>
    %475 = stablehlo.multiply %arg59, %420 : tensor<384xf32>
    %476 = stablehlo.multiply %471, %471 : tensor<384xf32>
    %477 = stablehlo.multiply %476, %423 : tensor<384xf32>
    %478 = stablehlo.add %475, %477 : tensor<384xf32>
    %479 = stablehlo.sqrt %478 : tensor<384xf32>
    %480 = stablehlo.add %arg58, %cst_32 : tensor<f32>
    %481 = stablehlo.power %cst_25, %480 : tensor<f32>
    %482 = stablehlo.subtract %cst_32, %481 : tensor<f32>
    %483 = stablehlo.sqrt %482 : tensor<f32>
    %484 = stablehlo.power %cst_24, %480 : tensor<f32>
    %485 = stablehlo.subtract %cst_32, %484 : tensor<f32>
    %486 = stablehlo.divide %331, %485 : tensor<f32>
    %487 = stablehlo.negate %486 : tensor<f32>
    %488 = stablehlo.multiply %483, %487 : tensor<f32>
    %489 = stablehlo.broadcast_in_dim %488, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %490 = stablehlo.divide %479, %489 : tensor<384xf32>
    %491 = stablehlo.divide %cst_32, %487 : tensor<f32>
    %492 = stablehlo.multiply %491, %arg0 : tensor<f32>
    %493 = stablehlo.broadcast_in_dim %492, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %494 = stablehlo.add %490, %493 : tensor<384xf32>
    %495 = stablehlo.divide %474, %494 : tensor<384xf32>
    %496 = stablehlo.add %arg17, %495 : tensor<384xf32>
    %497 = stablehlo.broadcast_in_dim %378, dims = [] : (tensor<f32>) -> tensor<1152x384xf32>
    %498 = stablehlo.multiply %arg14, %497 : tensor<1152x384xf32>
    %499 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1152x384xf32>
    %500 = stablehlo.dot_general %282, %63, contracting_dims = [0, 3] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x197x384xbf16>) -> tensor<6x64x384xbf16>
    %501 = stablehlo.dot_general %286, %63, contracting_dims = [0, 3] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x197x384xbf16>) -> tensor<6x64x384xbf16>
    %502 = stablehlo.dot_general %291, %63, contracting_dims = [0, 3] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x6x64x197xbf16>, tensor<8x197x384xbf16>) -> tensor<6x64x384xbf16>
    %503 = stablehlo.concatenate %500, %501, %502, dim = 0 : (tensor<6x64x384xbf16>, tensor<6x64x384xbf16>, tensor<6x64x384xbf16>) -> tensor<18x64x384xbf16>
    %504 = stablehlo.reshape %503 : (tensor<18x64x384xbf16>) -> tensor<1152x384xbf16>
    %505 = stablehlo.convert %504 : (tensor<1152x384xbf16>) -> tensor<1152x384xf32>
    %506 = stablehlo.subtract %505, %arg63 : tensor<1152x384xf32>
    %507 = stablehlo.multiply %499, %506 : tensor<1152x384xf32>
    %508 = stablehlo.add %arg63, %507 : tensor<1152x384xf32>
    %509 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1152x384xf32>
    %510 = stablehlo.multiply %arg62, %509 : tensor<1152x384xf32>
    %511 = stablehlo.multiply %505, %505 : tensor<1152x384xf32>
    %512 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1152x384xf32>
    %513 = stablehlo.multiply %511, %512 : tensor<1152x384xf32>
    %514 = stablehlo.add %510, %513 : tensor<1152x384xf32>
    %515 = stablehlo.sqrt %514 : tensor<1152x384xf32>
    %516 = stablehlo.add %arg61, %cst_32 : tensor<f32>
    %517 = stablehlo.power %cst_25, %516 : tensor<f32>
    %518 = stablehlo.subtract %cst_32, %517 : tensor<f32>
    %519 = stablehlo.sqrt %518 : tensor<f32>
    %520 = stablehlo.power %cst_24, %516 : tensor<f32>
    %521 = stablehlo.subtract %cst_32, %520 : tensor<f32>
    %522 = stablehlo.divide %376, %521 : tensor<f32>
    %523 = stablehlo.negate %522 : tensor<f32>
    %524 = stablehlo.multiply %519, %523 : tensor<f32>
    %525 = stablehlo.broadcast_in_dim %524, dims = [] : (tensor<f32>) -> tensor<1152x384xf32>
    %526 = stablehlo.divide %515, %525 : tensor<1152x384xf32>
    %527 = stablehlo.divide %cst_32, %523 : tensor<f32>
    %528 = stablehlo.multiply %527, %arg0 : tensor<f32>
    %529 = stablehlo.broadcast_in_dim %528, dims = [] : (tensor<f32>) -> tensor<1152x384xf32>
    %530 = stablehlo.add %526, %529 : tensor<1152x384xf32>
    %531 = stablehlo.divide %508, %530 : tensor<1152x384xf32>
    %532 = stablehlo.add %498, %531 : tensor<1152x384xf32>
    %533 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1152xf32>
    %534 = stablehlo.convert %282 : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %535 = stablehlo.reduce(%534 init: %cst_29) applies stablehlo.add across dimensions = [0, 3] : (tensor<8x6x64x197xf32>, tensor<f32>) -> tensor<6x64xf32>
    %536 = stablehlo.reshape %535 : (tensor<6x64xf32>) -> tensor<384xf32>
    %537 = stablehlo.convert %286 : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %538 = stablehlo.reduce(%537 init: %cst_29) applies stablehlo.add across dimensions = [0, 3] : (tensor<8x6x64x197xf32>, tensor<f32>) -> tensor<6x64xf32>
    %539 = stablehlo.reshape %538 : (tensor<6x64xf32>) -> tensor<384xf32>
    %540 = stablehlo.convert %291 : (tensor<8x6x64x197xbf16>) -> tensor<8x6x64x197xf32>
    %541 = stablehlo.reduce(%540 init: %cst_29) applies stablehlo.add across dimensions = [0, 3] : (tensor<8x6x64x197xf32>, tensor<f32>) -> tensor<6x64xf32>
    %542 = stablehlo.reshape %541 : (tensor<6x64xf32>) -> tensor<384xf32>
    %543 = stablehlo.concatenate %536, %539, %542, dim = 0 : (tensor<384xf32>, tensor<384xf32>, tensor<384xf32>) -> tensor<1152xf32>
    %544 = stablehlo.subtract %543, %arg66 : tensor<1152xf32>
    %545 = stablehlo.multiply %533, %544 : tensor<1152xf32>
    %546 = stablehlo.add %arg66, %545 : tensor<1152xf32>
    %547 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1152xf32>
    %548 = stablehlo.multiply %arg65, %547 : tensor<1152xf32>
    %549 = stablehlo.multiply %543, %543 : tensor<1152xf32>
    %550 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1152xf32>
    %551 = stablehlo.multiply %549, %550 : tensor<1152xf32>
    %552 = stablehlo.add %548, %551 : tensor<1152xf32>
    %553 = stablehlo.sqrt %552 : tensor<1152xf32>
    %554 = stablehlo.add %arg64, %cst_32 : tensor<f32>
    %555 = stablehlo.power %cst_25, %554 : tensor<f32>
    %556 = stablehlo.subtract %cst_32, %555 : tensor<f32>
    %557 = stablehlo.sqrt %556 : tensor<f32>
    %558 = stablehlo.power %cst_24, %554 : tensor<f32>
    %559 = stablehlo.subtract %cst_32, %558 : tensor<f32>
    %560 = stablehlo.divide %331, %559 : tensor<f32>
    %561 = stablehlo.negate %560 : tensor<f32>
    %562 = stablehlo.multiply %557, %561 : tensor<f32>
    %563 = stablehlo.broadcast_in_dim %562, dims = [] : (tensor<f32>) -> tensor<1152xf32>
    %564 = stablehlo.divide %553, %563 : tensor<1152xf32>
    %565 = stablehlo.divide %cst_32, %561 : tensor<f32>
    %566 = stablehlo.multiply %565, %arg0 : tensor<f32>
    %567 = stablehlo.broadcast_in_dim %566, dims = [] : (tensor<f32>) -> tensor<1152xf32>
    %568 = stablehlo.add %564, %567 : tensor<1152xf32>
    %569 = stablehlo.divide %546, %568 : tensor<1152xf32>
    %570 = stablehlo.add %arg16, %569 : tensor<1152xf32>
    %571 = stablehlo.broadcast_in_dim %378, dims = [] : (tensor<f32>) -> tensor<384x384xf32>
    %572 = stablehlo.multiply %arg18, %571 : tensor<384x384xf32>
    %573 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<384x384xf32>
    %574 = stablehlo.dot_general %260, %95, contracting_dims = [0, 1] x [0, 3] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x384xbf16>, tensor<8x6x64x197xbf16>) -> tensor<384x6x64xbf16>
    %575 = stablehlo.reshape %574 : (tensor<384x6x64xbf16>) -> tensor<384x384xbf16>
    %576 = stablehlo.convert %575 : (tensor<384x384xbf16>) -> tensor<384x384xf32>
    %577 = stablehlo.subtract %576, %arg69 : tensor<384x384xf32>
    %578 = stablehlo.multiply %573, %577 : tensor<384x384xf32>
    %579 = stablehlo.add %arg69, %578 : tensor<384x384xf32>
    %580 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<384x384xf32>
    %581 = stablehlo.multiply %arg68, %580 : tensor<384x384xf32>
    %582 = stablehlo.multiply %576, %576 : tensor<384x384xf32>
    %583 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<384x384xf32>
    %584 = stablehlo.multiply %582, %583 : tensor<384x384xf32>
    %585 = stablehlo.add %581, %584 : tensor<384x384xf32>
    %586 = stablehlo.sqrt %585 : tensor<384x384xf32>
    %587 = stablehlo.add %arg67, %cst_32 : tensor<f32>
    %588 = stablehlo.power %cst_25, %587 : tensor<f32>
    %589 = stablehlo.subtract %cst_32, %588 : tensor<f32>
    %590 = stablehlo.sqrt %589 : tensor<f32>
    %591 = stablehlo.power %cst_24, %587 : tensor<f32>
    %592 = stablehlo.subtract %cst_32, %591 : tensor<f32>
    %593 = stablehlo.divide %376, %592 : tensor<f32>
    %594 = stablehlo.negate %593 : tensor<f32>
    %595 = stablehlo.multiply %590, %594 : tensor<f32>
    %596 = stablehlo.broadcast_in_dim %595, dims = [] : (tensor<f32>) -> tensor<384x384xf32>
    %597 = stablehlo.divide %586, %596 : tensor<384x384xf32>
    %598 = stablehlo.divide %cst_32, %594 : tensor<f32>
    %599 = stablehlo.multiply %598, %arg0 : tensor<f32>
    %600 = stablehlo.broadcast_in_dim %599, dims = [] : (tensor<f32>) -> tensor<384x384xf32>
    %601 = stablehlo.add %597, %600 : tensor<384x384xf32>
    %602 = stablehlo.divide %579, %601 : tensor<384x384xf32>
    %603 = stablehlo.add %572, %602 : tensor<384x384xf32>
    %604 = stablehlo.convert %260 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %605 = stablehlo.reduce(%604 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<384xf32>
    %606 = stablehlo.subtract %605, %arg72 : tensor<384xf32>
    %607 = stablehlo.multiply %414, %606 : tensor<384xf32>
    %608 = stablehlo.add %arg72, %607 : tensor<384xf32>
    %609 = stablehlo.multiply %arg71, %420 : tensor<384xf32>
    %610 = stablehlo.multiply %605, %605 : tensor<384xf32>
    %611 = stablehlo.multiply %610, %423 : tensor<384xf32>
    %612 = stablehlo.add %609, %611 : tensor<384xf32>
    %613 = stablehlo.sqrt %612 : tensor<384xf32>
    %614 = stablehlo.add %arg70, %cst_32 : tensor<f32>
    %615 = stablehlo.power %cst_25, %614 : tensor<f32>
    %616 = stablehlo.subtract %cst_32, %615 : tensor<f32>
    %617 = stablehlo.sqrt %616 : tensor<f32>
    %618 = stablehlo.power %cst_24, %614 : tensor<f32>
    %619 = stablehlo.subtract %cst_32, %618 : tensor<f32>
    %620 = stablehlo.divide %331, %619 : tensor<f32>
    %621 = stablehlo.negate %620 : tensor<f32>
    %622 = stablehlo.multiply %617, %621 : tensor<f32>
    %623 = stablehlo.broadcast_in_dim %622, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %624 = stablehlo.divide %613, %623 : tensor<384xf32>
    %625 = stablehlo.divide %cst_32, %621 : tensor<f32>
    %626 = stablehlo.multiply %625, %arg0 : tensor<f32>
    %627 = stablehlo.broadcast_in_dim %626, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %628 = stablehlo.add %624, %627 : tensor<384xf32>
    %629 = stablehlo.divide %608, %628 : tensor<384xf32>
    %630 = stablehlo.add %arg19, %629 : tensor<384xf32>
    %631 = stablehlo.multiply %246, %120 : tensor<8x197x384xf32>
    %632 = stablehlo.reduce(%631 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<384xf32>
    %633 = stablehlo.subtract %632, %arg75 : tensor<384xf32>
    %634 = stablehlo.multiply %414, %633 : tensor<384xf32>
    %635 = stablehlo.add %arg75, %634 : tensor<384xf32>
    %636 = stablehlo.multiply %arg74, %420 : tensor<384xf32>
    %637 = stablehlo.multiply %632, %632 : tensor<384xf32>
    %638 = stablehlo.multiply %637, %423 : tensor<384xf32>
    %639 = stablehlo.add %636, %638 : tensor<384xf32>
    %640 = stablehlo.sqrt %639 : tensor<384xf32>
    %641 = stablehlo.add %arg73, %cst_32 : tensor<f32>
    %642 = stablehlo.power %cst_25, %641 : tensor<f32>
    %643 = stablehlo.subtract %cst_32, %642 : tensor<f32>
    %644 = stablehlo.sqrt %643 : tensor<f32>
    %645 = stablehlo.power %cst_24, %641 : tensor<f32>
    %646 = stablehlo.subtract %cst_32, %645 : tensor<f32>
    %647 = stablehlo.divide %331, %646 : tensor<f32>
    %648 = stablehlo.negate %647 : tensor<f32>
    %649 = stablehlo.multiply %644, %648 : tensor<f32>
    %650 = stablehlo.broadcast_in_dim %649, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %651 = stablehlo.divide %640, %650 : tensor<384xf32>
    %652 = stablehlo.divide %cst_32, %648 : tensor<f32>
    %653 = stablehlo.multiply %652, %arg0 : tensor<f32>
    %654 = stablehlo.broadcast_in_dim %653, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %655 = stablehlo.add %651, %654 : tensor<384xf32>
    %656 = stablehlo.divide %635, %655 : tensor<384xf32>
    %657 = stablehlo.add %arg20, %656 : tensor<384xf32>
    %658 = stablehlo.reduce(%246 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<384xf32>
    %659 = stablehlo.subtract %658, %arg78 : tensor<384xf32>
    %660 = stablehlo.multiply %414, %659 : tensor<384xf32>
    %661 = stablehlo.add %arg78, %660 : tensor<384xf32>
    %662 = stablehlo.multiply %arg77, %420 : tensor<384xf32>
    %663 = stablehlo.multiply %658, %658 : tensor<384xf32>
    %664 = stablehlo.multiply %663, %423 : tensor<384xf32>
    %665 = stablehlo.add %662, %664 : tensor<384xf32>
    %666 = stablehlo.sqrt %665 : tensor<384xf32>
    %667 = stablehlo.add %arg76, %cst_32 : tensor<f32>
    %668 = stablehlo.power %cst_25, %667 : tensor<f32>
    %669 = stablehlo.subtract %cst_32, %668 : tensor<f32>
    %670 = stablehlo.sqrt %669 : tensor<f32>
    %671 = stablehlo.power %cst_24, %667 : tensor<f32>
    %672 = stablehlo.subtract %cst_32, %671 : tensor<f32>
    %673 = stablehlo.divide %331, %672 : tensor<f32>
    %674 = stablehlo.negate %673 : tensor<f32>
    %675 = stablehlo.multiply %670, %674 : tensor<f32>
    %676 = stablehlo.broadcast_in_dim %675, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %677 = stablehlo.divide %666, %676 : tensor<384xf32>
    %678 = stablehlo.divide %cst_32, %674 : tensor<f32>
    %679 = stablehlo.multiply %678, %arg0 : tensor<f32>
    %680 = stablehlo.broadcast_in_dim %679, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %681 = stablehlo.add %677, %680 : tensor<384xf32>
    %682 = stablehlo.divide %661, %681 : tensor<384xf32>
    %683 = stablehlo.add %arg28, %682 : tensor<384xf32>
    %684 = stablehlo.broadcast_in_dim %378, dims = [] : (tensor<f32>) -> tensor<1536x384xf32>
    %685 = stablehlo.multiply %arg21, %684 : tensor<1536x384xf32>
    %686 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1536x384xf32>
    %687 = stablehlo.dot_general %244, %125, contracting_dims = [0, 1] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x1536xbf16>, tensor<8x197x384xbf16>) -> tensor<1536x384xbf16>
    %688 = stablehlo.convert %687 : (tensor<1536x384xbf16>) -> tensor<1536x384xf32>
    %689 = stablehlo.subtract %688, %arg81 : tensor<1536x384xf32>
    %690 = stablehlo.multiply %686, %689 : tensor<1536x384xf32>
    %691 = stablehlo.add %arg81, %690 : tensor<1536x384xf32>
    %692 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1536x384xf32>
    %693 = stablehlo.multiply %arg80, %692 : tensor<1536x384xf32>
    %694 = stablehlo.multiply %688, %688 : tensor<1536x384xf32>
    %695 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1536x384xf32>
    %696 = stablehlo.multiply %694, %695 : tensor<1536x384xf32>
    %697 = stablehlo.add %693, %696 : tensor<1536x384xf32>
    %698 = stablehlo.sqrt %697 : tensor<1536x384xf32>
    %699 = stablehlo.add %arg79, %cst_32 : tensor<f32>
    %700 = stablehlo.power %cst_25, %699 : tensor<f32>
    %701 = stablehlo.subtract %cst_32, %700 : tensor<f32>
    %702 = stablehlo.sqrt %701 : tensor<f32>
    %703 = stablehlo.power %cst_24, %699 : tensor<f32>
    %704 = stablehlo.subtract %cst_32, %703 : tensor<f32>
    %705 = stablehlo.divide %376, %704 : tensor<f32>
    %706 = stablehlo.negate %705 : tensor<f32>
    %707 = stablehlo.multiply %702, %706 : tensor<f32>
    %708 = stablehlo.broadcast_in_dim %707, dims = [] : (tensor<f32>) -> tensor<1536x384xf32>
    %709 = stablehlo.divide %698, %708 : tensor<1536x384xf32>
    %710 = stablehlo.divide %cst_32, %706 : tensor<f32>
    %711 = stablehlo.multiply %710, %arg0 : tensor<f32>
    %712 = stablehlo.broadcast_in_dim %711, dims = [] : (tensor<f32>) -> tensor<1536x384xf32>
    %713 = stablehlo.add %709, %712 : tensor<1536x384xf32>
    %714 = stablehlo.divide %691, %713 : tensor<1536x384xf32>
    %715 = stablehlo.add %685, %714 : tensor<1536x384xf32>
    %716 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1536xf32>
    %717 = stablehlo.convert %244 : (tensor<8x197x1536xbf16>) -> tensor<8x197x1536xf32>
    %718 = stablehlo.reduce(%717 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x1536xf32>, tensor<f32>) -> tensor<1536xf32>
    %719 = stablehlo.subtract %718, %arg84 : tensor<1536xf32>
    %720 = stablehlo.multiply %716, %719 : tensor<1536xf32>
    %721 = stablehlo.add %arg84, %720 : tensor<1536xf32>
    %722 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1536xf32>
    %723 = stablehlo.multiply %arg83, %722 : tensor<1536xf32>
    %724 = stablehlo.multiply %718, %718 : tensor<1536xf32>
    %725 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1536xf32>
    %726 = stablehlo.multiply %724, %725 : tensor<1536xf32>
    %727 = stablehlo.add %723, %726 : tensor<1536xf32>
    %728 = stablehlo.sqrt %727 : tensor<1536xf32>
    %729 = stablehlo.add %arg82, %cst_32 : tensor<f32>
    %730 = stablehlo.power %cst_25, %729 : tensor<f32>
    %731 = stablehlo.subtract %cst_32, %730 : tensor<f32>
    %732 = stablehlo.sqrt %731 : tensor<f32>
    %733 = stablehlo.power %cst_24, %729 : tensor<f32>
    %734 = stablehlo.subtract %cst_32, %733 : tensor<f32>
    %735 = stablehlo.divide %331, %734 : tensor<f32>
    %736 = stablehlo.negate %735 : tensor<f32>
    %737 = stablehlo.multiply %732, %736 : tensor<f32>
    %738 = stablehlo.broadcast_in_dim %737, dims = [] : (tensor<f32>) -> tensor<1536xf32>
    %739 = stablehlo.divide %728, %738 : tensor<1536xf32>
    %740 = stablehlo.divide %cst_32, %736 : tensor<f32>
    %741 = stablehlo.multiply %740, %arg0 : tensor<f32>
    %742 = stablehlo.broadcast_in_dim %741, dims = [] : (tensor<f32>) -> tensor<1536xf32>
    %743 = stablehlo.add %739, %742 : tensor<1536xf32>
    %744 = stablehlo.divide %721, %743 : tensor<1536xf32>
    %745 = stablehlo.add %arg27, %744 : tensor<1536xf32>
    %746 = stablehlo.broadcast_in_dim %378, dims = [] : (tensor<f32>) -> tensor<384x1536xf32>
    %747 = stablehlo.multiply %arg32, %746 : tensor<384x1536xf32>
    %748 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<384x1536xf32>
    %749 = stablehlo.dot_general %228, %149, contracting_dims = [0, 1] x [0, 1] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x197x384xbf16>, tensor<8x197x1536xbf16>) -> tensor<384x1536xbf16>
    %750 = stablehlo.convert %749 : (tensor<384x1536xbf16>) -> tensor<384x1536xf32>
    %751 = stablehlo.subtract %750, %arg87 : tensor<384x1536xf32>
    %752 = stablehlo.multiply %748, %751 : tensor<384x1536xf32>
    %753 = stablehlo.add %arg87, %752 : tensor<384x1536xf32>
    %754 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<384x1536xf32>
    %755 = stablehlo.multiply %arg86, %754 : tensor<384x1536xf32>
    %756 = stablehlo.multiply %750, %750 : tensor<384x1536xf32>
    %757 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<384x1536xf32>
    %758 = stablehlo.multiply %756, %757 : tensor<384x1536xf32>
    %759 = stablehlo.add %755, %758 : tensor<384x1536xf32>
    %760 = stablehlo.sqrt %759 : tensor<384x1536xf32>
    %761 = stablehlo.add %arg85, %cst_32 : tensor<f32>
    %762 = stablehlo.power %cst_25, %761 : tensor<f32>
    %763 = stablehlo.subtract %cst_32, %762 : tensor<f32>
    %764 = stablehlo.sqrt %763 : tensor<f32>
    %765 = stablehlo.power %cst_24, %761 : tensor<f32>
    %766 = stablehlo.subtract %cst_32, %765 : tensor<f32>
    %767 = stablehlo.divide %376, %766 : tensor<f32>
    %768 = stablehlo.negate %767 : tensor<f32>
    %769 = stablehlo.multiply %764, %768 : tensor<f32>
    %770 = stablehlo.broadcast_in_dim %769, dims = [] : (tensor<f32>) -> tensor<384x1536xf32>
    %771 = stablehlo.divide %760, %770 : tensor<384x1536xf32>
    %772 = stablehlo.divide %cst_32, %768 : tensor<f32>
    %773 = stablehlo.multiply %772, %arg0 : tensor<f32>
    %774 = stablehlo.broadcast_in_dim %773, dims = [] : (tensor<f32>) -> tensor<384x1536xf32>
    %775 = stablehlo.add %771, %774 : tensor<384x1536xf32>
    %776 = stablehlo.divide %753, %775 : tensor<384x1536xf32>
    %777 = stablehlo.add %747, %776 : tensor<384x1536xf32>
    %778 = stablehlo.convert %228 : (tensor<8x197x384xbf16>) -> tensor<8x197x384xf32>
    %779 = stablehlo.reduce(%778 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x197x384xf32>, tensor<f32>) -> tensor<384xf32>
    %780 = stablehlo.subtract %779, %arg90 : tensor<384xf32>
    %781 = stablehlo.multiply %414, %780 : tensor<384xf32>
    %782 = stablehlo.add %arg90, %781 : tensor<384xf32>
    %783 = stablehlo.multiply %arg89, %420 : tensor<384xf32>
    %784 = stablehlo.multiply %779, %779 : tensor<384xf32>
    %785 = stablehlo.multiply %784, %423 : tensor<384xf32>
    %786 = stablehlo.add %783, %785 : tensor<384xf32>
    %787 = stablehlo.sqrt %786 : tensor<384xf32>
    %788 = stablehlo.add %arg88, %cst_32 : tensor<f32>
    %789 = stablehlo.power %cst_25, %788 : tensor<f32>
    %790 = stablehlo.subtract %cst_32, %789 : tensor<f32>
    %791 = stablehlo.sqrt %790 : tensor<f32>
    %792 = stablehlo.power %cst_24, %788 : tensor<f32>
    %793 = stablehlo.subtract %cst_32, %792 : tensor<f32>
    %794 = stablehlo.divide %331, %793 : tensor<f32>
    %795 = stablehlo.negate %794 : tensor<f32>
    %796 = stablehlo.multiply %791, %795 : tensor<f32>
    %797 = stablehlo.broadcast_in_dim %796, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %798 = stablehlo.divide %787, %797 : tensor<384xf32>
    %799 = stablehlo.divide %cst_32, %795 : tensor<f32>
    %800 = stablehlo.multiply %799, %arg0 : tensor<f32>
    %801 = stablehlo.broadcast_in_dim %800, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %802 = stablehlo.add %798, %801 : tensor<384xf32>
    %803 = stablehlo.divide %782, %802 : tensor<384xf32>
    %804 = stablehlo.add %arg33, %803 : tensor<384xf32>
    %805 = stablehlo.multiply %210, %181 : tensor<8x1x384xf32>
    %806 = stablehlo.reduce(%805 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<384xf32>
    %807 = stablehlo.subtract %806, %arg93 : tensor<384xf32>
    %808 = stablehlo.multiply %414, %807 : tensor<384xf32>
    %809 = stablehlo.add %arg93, %808 : tensor<384xf32>
    %810 = stablehlo.multiply %arg92, %420 : tensor<384xf32>
    %811 = stablehlo.multiply %806, %806 : tensor<384xf32>
    %812 = stablehlo.multiply %811, %423 : tensor<384xf32>
    %813 = stablehlo.add %810, %812 : tensor<384xf32>
    %814 = stablehlo.sqrt %813 : tensor<384xf32>
    %815 = stablehlo.add %arg91, %cst_32 : tensor<f32>
    %816 = stablehlo.power %cst_25, %815 : tensor<f32>
    %817 = stablehlo.subtract %cst_32, %816 : tensor<f32>
    %818 = stablehlo.sqrt %817 : tensor<f32>
    %819 = stablehlo.power %cst_24, %815 : tensor<f32>
    %820 = stablehlo.subtract %cst_32, %819 : tensor<f32>
    %821 = stablehlo.divide %331, %820 : tensor<f32>
    %822 = stablehlo.negate %821 : tensor<f32>
    %823 = stablehlo.multiply %818, %822 : tensor<f32>
    %824 = stablehlo.broadcast_in_dim %823, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %825 = stablehlo.divide %814, %824 : tensor<384xf32>
    %826 = stablehlo.divide %cst_32, %822 : tensor<f32>
    %827 = stablehlo.multiply %826, %arg0 : tensor<f32>
    %828 = stablehlo.broadcast_in_dim %827, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %829 = stablehlo.add %825, %828 : tensor<384xf32>
    %830 = stablehlo.divide %809, %829 : tensor<384xf32>
    %831 = stablehlo.add %arg34, %830 : tensor<384xf32>
    %832 = stablehlo.reduce(%210 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x1x384xf32>, tensor<f32>) -> tensor<384xf32>
    %833 = stablehlo.subtract %832, %arg96 : tensor<384xf32>
    %834 = stablehlo.multiply %414, %833 : tensor<384xf32>
    %835 = stablehlo.add %arg96, %834 : tensor<384xf32>
    %836 = stablehlo.multiply %arg95, %420 : tensor<384xf32>
    %837 = stablehlo.multiply %832, %832 : tensor<384xf32>
    %838 = stablehlo.multiply %837, %423 : tensor<384xf32>
    %839 = stablehlo.add %836, %838 : tensor<384xf32>
    %840 = stablehlo.sqrt %839 : tensor<384xf32>
    %841 = stablehlo.add %arg94, %cst_32 : tensor<f32>
    %842 = stablehlo.power %cst_25, %841 : tensor<f32>
    %843 = stablehlo.subtract %cst_32, %842 : tensor<f32>
    %844 = stablehlo.sqrt %843 : tensor<f32>
    %845 = stablehlo.power %cst_24, %841 : tensor<f32>
    %846 = stablehlo.subtract %cst_32, %845 : tensor<f32>
    %847 = stablehlo.divide %331, %846 : tensor<f32>
    %848 = stablehlo.negate %847 : tensor<f32>
    %849 = stablehlo.multiply %844, %848 : tensor<f32>
    %850 = stablehlo.broadcast_in_dim %849, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %851 = stablehlo.divide %840, %850 : tensor<384xf32>
    %852 = stablehlo.divide %cst_32, %848 : tensor<f32>
    %853 = stablehlo.multiply %852, %arg0 : tensor<f32>
    %854 = stablehlo.broadcast_in_dim %853, dims = [] : (tensor<f32>) -> tensor<384xf32>
    %855 = stablehlo.add %851, %854 : tensor<384xf32>
    %856 = stablehlo.divide %835, %855 : tensor<384xf32>
    %857 = stablehlo.add %arg37, %856 : tensor<384xf32>
    %858 = stablehlo.broadcast_in_dim %378, dims = [] : (tensor<f32>) -> tensor<1000x384xf32>
    %859 = stablehlo.multiply %arg35, %858 : tensor<1000x384xf32>
    %860 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1000x384xf32>
    %861 = stablehlo.dot_general %207, %187, contracting_dims = [0] x [0] {mhlo.frontend_attributes = {grad_x = "false", grad_y = "false"}} : (tensor<8x1000xbf16>, tensor<8x384xbf16>) -> tensor<1000x384xbf16>
    %862 = stablehlo.convert %861 : (tensor<1000x384xbf16>) -> tensor<1000x384xf32>
    %863 = stablehlo.subtract %862, %arg99 : tensor<1000x384xf32>
    %864 = stablehlo.multiply %860, %863 : tensor<1000x384xf32>
    %865 = stablehlo.add %arg99, %864 : tensor<1000x384xf32>
    %866 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1000x384xf32>
    %867 = stablehlo.multiply %arg98, %866 : tensor<1000x384xf32>
    %868 = stablehlo.multiply %862, %862 : tensor<1000x384xf32>
    %869 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1000x384xf32>
    %870 = stablehlo.multiply %868, %869 : tensor<1000x384xf32>
    %871 = stablehlo.add %867, %870 : tensor<1000x384xf32>
    %872 = stablehlo.sqrt %871 : tensor<1000x384xf32>
    %873 = stablehlo.add %arg97, %cst_32 : tensor<f32>
    %874 = stablehlo.power %cst_25, %873 : tensor<f32>
    %875 = stablehlo.subtract %cst_32, %874 : tensor<f32>
    %876 = stablehlo.sqrt %875 : tensor<f32>
    %877 = stablehlo.power %cst_24, %873 : tensor<f32>
    %878 = stablehlo.subtract %cst_32, %877 : tensor<f32>
    %879 = stablehlo.divide %376, %878 : tensor<f32>
    %880 = stablehlo.negate %879 : tensor<f32>
    %881 = stablehlo.multiply %876, %880 : tensor<f32>
    %882 = stablehlo.broadcast_in_dim %881, dims = [] : (tensor<f32>) -> tensor<1000x384xf32>
    %883 = stablehlo.divide %872, %882 : tensor<1000x384xf32>
    %884 = stablehlo.divide %cst_32, %880 : tensor<f32>
    %885 = stablehlo.multiply %884, %arg0 : tensor<f32>
    %886 = stablehlo.broadcast_in_dim %885, dims = [] : (tensor<f32>) -> tensor<1000x384xf32>
    %887 = stablehlo.add %883, %886 : tensor<1000x384xf32>
    %888 = stablehlo.divide %865, %887 : tensor<1000x384xf32>
    %889 = stablehlo.add %859, %888 : tensor<1000x384xf32>
    %890 = stablehlo.broadcast_in_dim %arg43, dims = [] : (tensor<f32>) -> tensor<1000xf32>
    %891 = stablehlo.convert %207 : (tensor<8x1000xbf16>) -> tensor<8x1000xf32>
    %892 = stablehlo.reduce(%891 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<8x1000xf32>, tensor<f32>) -> tensor<1000xf32>
    %893 = stablehlo.subtract %892, %arg102 : tensor<1000xf32>
    %894 = stablehlo.multiply %890, %893 : tensor<1000xf32>
    %895 = stablehlo.add %arg102, %894 : tensor<1000xf32>
    %896 = stablehlo.broadcast_in_dim %arg41, dims = [] : (tensor<f32>) -> tensor<1000xf32>
    %897 = stablehlo.multiply %arg101, %896 : tensor<1000xf32>
    %898 = stablehlo.multiply %892, %892 : tensor<1000xf32>
    %899 = stablehlo.broadcast_in_dim %321, dims = [] : (tensor<f32>) -> tensor<1000xf32>
    %900 = stablehlo.multiply %898, %899 : tensor<1000xf32>
    %901 = stablehlo.add %897, %900 : tensor<1000xf32>
    %902 = stablehlo.sqrt %901 : tensor<1000xf32>
    %903 = stablehlo.add %arg100, %cst_32 : tensor<f32>
    %904 = stablehlo.power %cst_25, %903 : tensor<f32>
    %905 = stablehlo.subtract %cst_32, %904 : tensor<f32>
    %906 = stablehlo.sqrt %905 : tensor<f32>
    %907 = stablehlo.power %cst_24, %903 : tensor<f32>
    %908 = stablehlo.subtract %cst_32, %907 : tensor<f32>
    %909 = stablehlo.divide %331, %908 : tensor<f32>
    %910 = stablehlo.negate %909 : tensor<f32>
    %911 = stablehlo.multiply %906, %910 : tensor<f32>
    %912 = stablehlo.broadcast_in_dim %911, dims = [] : (tensor<f32>) -> tensor<1000xf32>
    %913 = stablehlo.divide %902, %912 : tensor<1000xf32>
    %914 = stablehlo.divide %cst_32, %910 : tensor<f32>
    %915 = stablehlo.multiply %914, %arg0 : tensor<f32>
    %916 = stablehlo.broadcast_in_dim %915, dims = [] : (tensor<f32>) -> tensor<1000xf32>
    %917 = stablehlo.add %913, %916 : tensor<1000xf32>
    %918 = stablehlo.divide %895, %917 : tensor<1000xf32>
    %919 = stablehlo.add %arg36, %918 : tensor<1000xf32>
    %920 = stablehlo.compare  LT, %arg103, %cst_29 : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %921 = stablehlo.convert %920 : (tensor<i1>) -> tensor<ui8>
    %922 = stablehlo.multiply %13, %201 : tensor<8x1000xf32>
    %923 = stablehlo.reduce(%922 init: %cst_29) applies stablehlo.add across dimensions = [1] : (tensor<8x1000xf32>, tensor<f32>) -> tensor<8xf32>
    %924 = stablehlo.negate %923 : tensor<8xf32>
    %925 = stablehlo.select %arg40, %924, %cst_20 : tensor<8xi1>, tensor<8xf32>
    %926 = stablehlo.reduce(%925 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
    %927 = stablehlo.divide %926, %4 : tensor<f32>
    %928 = stablehlo.divide %927, %cst_32 : tensor<f32>
    %929 = stablehlo.reshape %928 : (tensor<f32>) -> tensor<1xf32>
    %930 = stablehlo.reshape %927 : (tensor<f32>) -> tensor<1xf32>
    %931 = stablehlo.reduce(%930 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<1xf32>, tensor<f32>) -> tensor<f32>
    %932 = stablehlo.divide %931, %cst_32 : tensor<f32>
    %933 = stablehlo.reshape %932 : (tensor<f32>) -> tensor<1xf32>
    %934 = stablehlo.abs %314 : tensor<1x1x384xf32>
    %935 = stablehlo.power %934, %cst_11 : tensor<1x1x384xf32>
    %936 = stablehlo.reduce(%935 init: %cst_29) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<1x1x384xf32>, tensor<f32>) -> tensor<f32>
    %937 = stablehlo.power %936, %cst_23 : tensor<f32>
    %938 = stablehlo.reshape %937 : (tensor<f32>) -> tensor<1xf32>
    %939 = stablehlo.abs %347 : tensor<1x197x384xf32>
    %940 = stablehlo.power %939, %cst_10 : tensor<1x197x384xf32>
    %941 = stablehlo.reduce(%940 init: %cst_29) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<1x197x384xf32>, tensor<f32>) -> tensor<f32>
    %942 = stablehlo.power %941, %cst_23 : tensor<f32>
    %943 = stablehlo.reshape %942 : (tensor<f32>) -> tensor<1xf32>
    %944 = stablehlo.abs %386 : tensor<384x3x16x16xf32>
    %945 = stablehlo.power %944, %cst_9 : tensor<384x3x16x16xf32>
    %946 = stablehlo.reduce(%945 init: %cst_29) applies stablehlo.add across dimensions = [0, 1, 2, 3] : (tensor<384x3x16x16xf32>, tensor<f32>) -> tensor<f32>
    %947 = stablehlo.power %946, %cst_23 : tensor<f32>
    %948 = stablehlo.reshape %947 : (tensor<f32>) -> tensor<1xf32>
    %949 = stablehlo.abs %416 : tensor<384xf32>
    %950 = stablehlo.power %949, %cst_8 : tensor<384xf32>
    %951 = stablehlo.reduce(%950 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %952 = stablehlo.power %951, %cst_23 : tensor<f32>
    %953 = stablehlo.reshape %952 : (tensor<f32>) -> tensor<1xf32>
    %954 = stablehlo.abs %445 : tensor<384xf32>
    %955 = stablehlo.power %954, %cst_8 : tensor<384xf32>
    %956 = stablehlo.reduce(%955 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %957 = stablehlo.power %956, %cst_23 : tensor<f32>
    %958 = stablehlo.reshape %957 : (tensor<f32>) -> tensor<1xf32>
    %959 = stablehlo.abs %471 : tensor<384xf32>
    %960 = stablehlo.power %959, %cst_8 : tensor<384xf32>
    %961 = stablehlo.reduce(%960 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %962 = stablehlo.power %961, %cst_23 : tensor<f32>
    %963 = stablehlo.reshape %962 : (tensor<f32>) -> tensor<1xf32>
    %964 = stablehlo.abs %505 : tensor<1152x384xf32>
    %965 = stablehlo.power %964, %cst_7 : tensor<1152x384xf32>
    %966 = stablehlo.reduce(%965 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<1152x384xf32>, tensor<f32>) -> tensor<f32>
    %967 = stablehlo.power %966, %cst_23 : tensor<f32>
    %968 = stablehlo.reshape %967 : (tensor<f32>) -> tensor<1xf32>
    %969 = stablehlo.abs %543 : tensor<1152xf32>
    %970 = stablehlo.power %969, %cst_6 : tensor<1152xf32>
    %971 = stablehlo.reduce(%970 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<1152xf32>, tensor<f32>) -> tensor<f32>
    %972 = stablehlo.power %971, %cst_23 : tensor<f32>
    %973 = stablehlo.reshape %972 : (tensor<f32>) -> tensor<1xf32>
    %974 = stablehlo.abs %576 : tensor<384x384xf32>
    %975 = stablehlo.power %974, %cst_5 : tensor<384x384xf32>
    %976 = stablehlo.reduce(%975 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<384x384xf32>, tensor<f32>) -> tensor<f32>
    %977 = stablehlo.power %976, %cst_23 : tensor<f32>
    %978 = stablehlo.reshape %977 : (tensor<f32>) -> tensor<1xf32>
    %979 = stablehlo.abs %605 : tensor<384xf32>
    %980 = stablehlo.power %979, %cst_8 : tensor<384xf32>
    %981 = stablehlo.reduce(%980 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %982 = stablehlo.power %981, %cst_23 : tensor<f32>
    %983 = stablehlo.reshape %982 : (tensor<f32>) -> tensor<1xf32>
    %984 = stablehlo.abs %632 : tensor<384xf32>
    %985 = stablehlo.power %984, %cst_8 : tensor<384xf32>
    %986 = stablehlo.reduce(%985 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %987 = stablehlo.power %986, %cst_23 : tensor<f32>
    %988 = stablehlo.reshape %987 : (tensor<f32>) -> tensor<1xf32>
    %989 = stablehlo.abs %658 : tensor<384xf32>
    %990 = stablehlo.power %989, %cst_8 : tensor<384xf32>
    %991 = stablehlo.reduce(%990 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %992 = stablehlo.power %991, %cst_23 : tensor<f32>
    %993 = stablehlo.reshape %992 : (tensor<f32>) -> tensor<1xf32>
    %994 = stablehlo.abs %688 : tensor<1536x384xf32>
    %995 = stablehlo.power %994, %cst_4 : tensor<1536x384xf32>
    %996 = stablehlo.reduce(%995 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<1536x384xf32>, tensor<f32>) -> tensor<f32>
    %997 = stablehlo.power %996, %cst_23 : tensor<f32>
    %998 = stablehlo.reshape %997 : (tensor<f32>) -> tensor<1xf32>
    %999 = stablehlo.abs %718 : tensor<1536xf32>
    %1000 = stablehlo.power %999, %cst_3 : tensor<1536xf32>
    %1001 = stablehlo.reduce(%1000 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<1536xf32>, tensor<f32>) -> tensor<f32>
    %1002 = stablehlo.power %1001, %cst_23 : tensor<f32>
    %1003 = stablehlo.reshape %1002 : (tensor<f32>) -> tensor<1xf32>
    %1004 = stablehlo.abs %750 : tensor<384x1536xf32>
    %1005 = stablehlo.power %1004, %cst_2 : tensor<384x1536xf32>
    %1006 = stablehlo.reduce(%1005 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<384x1536xf32>, tensor<f32>) -> tensor<f32>
    %1007 = stablehlo.power %1006, %cst_23 : tensor<f32>
    %1008 = stablehlo.reshape %1007 : (tensor<f32>) -> tensor<1xf32>
    %1009 = stablehlo.abs %779 : tensor<384xf32>
    %1010 = stablehlo.power %1009, %cst_8 : tensor<384xf32>
    %1011 = stablehlo.reduce(%1010 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %1012 = stablehlo.power %1011, %cst_23 : tensor<f32>
    %1013 = stablehlo.reshape %1012 : (tensor<f32>) -> tensor<1xf32>
    %1014 = stablehlo.abs %806 : tensor<384xf32>
    %1015 = stablehlo.power %1014, %cst_8 : tensor<384xf32>
    %1016 = stablehlo.reduce(%1015 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %1017 = stablehlo.power %1016, %cst_23 : tensor<f32>
    %1018 = stablehlo.reshape %1017 : (tensor<f32>) -> tensor<1xf32>
    %1019 = stablehlo.abs %832 : tensor<384xf32>
    %1020 = stablehlo.power %1019, %cst_8 : tensor<384xf32>
    %1021 = stablehlo.reduce(%1020 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<384xf32>, tensor<f32>) -> tensor<f32>
    %1022 = stablehlo.power %1021, %cst_23 : tensor<f32>
    %1023 = stablehlo.reshape %1022 : (tensor<f32>) -> tensor<1xf32>
    %1024 = stablehlo.abs %862 : tensor<1000x384xf32>
    %1025 = stablehlo.power %1024, %cst_1 : tensor<1000x384xf32>
    %1026 = stablehlo.reduce(%1025 init: %cst_29) applies stablehlo.add across dimensions = [0, 1] : (tensor<1000x384xf32>, tensor<f32>) -> tensor<f32>
    %1027 = stablehlo.power %1026, %cst_23 : tensor<f32>
    %1028 = stablehlo.reshape %1027 : (tensor<f32>) -> tensor<1xf32>
    %1029 = stablehlo.abs %892 : tensor<1000xf32>
    %1030 = stablehlo.power %1029, %cst_0 : tensor<1000xf32>
    %1031 = stablehlo.reduce(%1030 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
    %1032 = stablehlo.power %1031, %cst_23 : tensor<f32>
    %1033 = stablehlo.reshape %1032 : (tensor<f32>) -> tensor<1xf32>
    %1034 = stablehlo.concatenate %938, %943, %948, %953, %958, %963, %968, %973, %978, %983, %988, %993, %998, %1003, %1008, %1013, %1018, %1023, %1028, %1033, dim = 0 : (tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>) -> tensor<20xf32>
    %1035 = stablehlo.abs %1034 : tensor<20xf32>
    %1036 = stablehlo.power %1035, %cst : tensor<20xf32>
    %1037 = stablehlo.reduce(%1036 init: %cst_29) applies stablehlo.add across dimensions = [0] : (tensor<20xf32>, tensor<f32>) -> tensor<f32>
    %1038 = stablehlo.power %1037, %cst_23 : tensor<f32>
    %1039 = stablehlo.reshape %1038 : (tensor<f32>) -> tensor<1xf32>
    %1040 = stablehlo.concatenate %929, %933, %1039, dim = 0 : (tensor<1xf32>, tensor<1xf32>, tensor<1xf32>) -> tensor<3xf32>
    %1041 = stablehlo.compare  EQ, %1040, %1040 : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xi1>
    %1042 = stablehlo.abs %1040 : tensor<3xf32>
    %1043 = stablehlo.convert %1042 : (tensor<3xf32>) -> tensor<3xf64>
    %1044 = stablehlo.broadcast_in_dim %arg105, dims = [] : (tensor<f64>) -> tensor<3xf64>
    %1045 = stablehlo.compare  NE, %1043, %1044 : (tensor<3xf64>, tensor<3xf64>) -> tensor<3xi1>
    %1046 = stablehlo.multiply %1041, %1045 : tensor<3xi1>
    %1047 = stablehlo.reduce(%1046 init: %c_22) across dimensions = [0] : (tensor<3xi1>, tensor<i1>) -> tensor<i1>
     reducer(%arg106: tensor<i1>, %arg107: tensor<i1>)  {
      %1056 = stablehlo.and %arg106, %arg107 : tensor<i1>
      %1057 = stablehlo.select %1056, %c_22, %c_21 : tensor<i1>, tensor<i1>
      stablehlo.return %1057 : tensor<i1>
    }
    %1048 = stablehlo.not %1047 : tensor<i1>
    %1049 = stablehlo.convert %1048 : (tensor<i1>) -> tensor<ui8>
    %1050 = stablehlo.and %921, %1049 : tensor<ui8>
    %1051 = stablehlo.compare  NE, %1050, %c : (tensor<ui8>, tensor<ui8>) -> tensor<i1>
    %1052 = stablehlo.reshape %arg104 : (tensor<1xf32>) -> tensor<f32>
    %1053 = stablehlo.select %1051, %1052, %arg103 : tensor<i1>, tensor<f32>
    %1054 = stablehlo.reshape %1053 : (tensor<f32>) -> tensor<1xf32>
    %1055 = stablehlo.concatenate %1040, %1054, dim = 0 : (tensor<3xf32>, tensor<1xf32>) -> tensor<4xf32>
    return %344, %374, %413, %443, %470, %496, %532, %570, %603, %630, %657, %683, %715, %745, %777, %804, %831, %857, %889, %919, %326, %317, %324, %358, %350, %356, %427, %419, %425, %454, %448, %452, %480, %474, %478, %554, %546, %552, %614, %608, %612, %641, %635, %639, %667, %661, %665, %729, %721, %727, %788, %782, %786, %815, %809, %813, %841, %835, %839, %903, %895, %901, %397, %389, %395, %516, %508, %514, %587, %579, %585, %699, %691, %697, %761, %753, %759, %873, %865, %871, %1053, %arg10, %arg9, %1055 : tensor<1x1x384xf32>, tensor<1x197x384xf32>, tensor<384x3x16x16xf32>, tensor<384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<1152x384xf32>, tensor<1152xf32>, tensor<384x384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<1536x384xf32>, tensor<1536xf32>, tensor<384x1536xf32>, tensor<384xf32>, tensor<384xf32>, tensor<384xf32>, tensor<1000x384xf32>, tensor<1000xf32>, tensor<f32>, tensor<1x1x384xf32>, tensor<1x1x384xf32>, tensor<f32>, tensor<1x197x384xf32>, tensor<1x197x384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<1152xf32>, tensor<1152xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<1536xf32>, tensor<1536xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<384xf32>, tensor<384xf32>, tensor<f32>, tensor<1000xf32>, tensor<1000xf32>, tensor<f32>, tensor<384x3x16x16xf32>, tensor<384x3x16x16xf32>, tensor<f32>, tensor<1152x384xf32>, tensor<1152x384xf32>, tensor<f32>, tensor<384x384xf32>, tensor<384x384xf32>, tensor<f32>, tensor<1536x384xf32>, tensor<1536x384xf32>, tensor<f32>, tensor<384x1536xf32>, tensor<384x1536xf32>, tensor<f32>, tensor<1000x384xf32>, tensor<1000x384xf32>, tensor<f32>, tensor<1x3x1x1xf32>, tensor<1x3x1x1xf32>, tensor<4xf32>
  }
}
